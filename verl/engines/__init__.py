"""One process's share of a model in training: forward, loss, optimizer step, sharding.

chunked_logprobs      Log-probabilities and entropies of response tokens, computed in chunks
engine                The training engine: inference and optimizer steps over micro-batches; compilation of layers
fsdp                  FSDP2: weights, gradients and optimizer state sharded over processes
optimizer             AdamW and its learning-rate schedule, as one component
parallel_degrees      Sizes of the process mesh, layers of each pipeline stage; memory and traffic under a sharding
parallel_dims         The parallel dimensions of one training process: data-parallel replicas, FSDP shards
pipeline              Pipeline stages of a model
pipeline_parallelism  One process of a pipeline: its stage, and what the stages exchange
sharding              `sharding=`: how a model in training is spread over processes
tensor_parallel       Tensor parallelism, by the plan of transformers or of a module of the user's; expert parallelism
"""
