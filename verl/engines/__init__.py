"""One process's share of a model in training: forward, loss, optimizer step, sharding.

chunked_logprobs  Log-probabilities and entropies of response tokens, computed in chunks
engine            The training engine: inference and optimizer steps over micro-batches, equal to one big batch
fsdp              FSDP2: weights, gradients and optimizer state sharded over processes
optimizer         AdamW and its learning-rate schedule, as one component
own_module        A module of the user's over tensor-parallel processes
parallel_dims     The parallel dimensions of one training process: data-parallel replicas, FSDP shards
sharding          `sharding=`: how a model in training is spread over processes, and what that costs each of them
stage_shards      Weights of a pipeline stage that are sharded over processes, and whole while it runs
tensor_parallel   Tensor parallelism by the plan that transformers has for a model
"""
