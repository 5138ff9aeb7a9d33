"""One process's share of a model in training: forward, loss, optimizer step, sharding.

costs            What a division of a model costs each process: memory at rest, memory meanwhile, traffic
engine           The training engine: inference and optimizer steps over micro-batches, equal to one big batch
expert_plan      The experts of a mixture in a tensor-parallel plan: each process has some of them, whole
filling          A model that was made without weights, and divided
fully_sharded    Weights, gradients and optimizer state in parts, one per process, by FSDP2
optim            The optimizer and its learning-rate schedule, as one description
parallel         This process among those that train one model together: the sums they take
sharded          This process where a model's weights are divided: over shards of the data-parallel processes
sharding         How a model in training is spread over processes: the options of `sharding=`
tensor_parallel  Linear layers divided over processes that work on the same rows
token_scores     Log-probabilities and entropies of response tokens, without ever holding all of their logits
"""
