"""One process's share of a model in training: forward, loss, optimizer step, sharding.

chunked_logprobs      Log-probabilities and entropies of response tokens, computed in chunks
engine                The training engine: inference and optimizer steps over micro-batches, equal to one big batch
expert_parallel       Expert parallelism: each process holds some experts of every layer
fsdp                  FSDP2: weights, gradients and optimizer state sharded over processes
layer_compile         Compilation of a model layer by layer
optimizer             AdamW and its learning-rate schedule, as one component
parallel_degrees      Sizes of the process mesh, one per kind of parallelism; layers of each pipeline stage, by cost
parallel_dims         The parallel dimensions of one training process: data-parallel replicas, FSDP shards
pipeline              Pipeline stages of a model
pipeline_parallelism  One process of a pipeline: its stage, and what the stages exchange
sharding              `sharding=`: how a model in training is spread over processes
sharding_cost         Memory and traffic of each process under a sharding, by arithmetic
stage_shards          Weights of a pipeline stage that are sharded over processes, and whole while it runs
tensor_parallel       Tensor parallelism: by the plan that transformers has for a model, or of a module of the user's
"""
