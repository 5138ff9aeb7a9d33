"""One process's share of a model in training: forward, loss, optimizer step, sharding.

chunked_logprobs      Log-probabilities and entropies of response tokens, computed in chunks
engine                The training engine: inference, forward_backward and optim_step over micro-batches
fsdp                  FSDP2: weights, gradients and optimizer state sharded over processes
layer_compile         Compilation of a model, layer by layer
optimizer             AdamW and its learning-rate schedule, as one component
parallel_degrees      Sizes of the process mesh, layers of each pipeline stage; memory and traffic under a sharding
parallel_dims         The parallel dimensions of one training process: data-parallel replicas, FSDP shards
pipeline_parallelism  Pipeline parallelism: stages of a model, their schedule, and what they exchange
sharding              `sharding=`: how a model in training is spread over processes
tensor_parallel       Tensor parallelism, by the plan of transformers or of a module of the user's; expert parallelism
"""
