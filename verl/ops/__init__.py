"""Pure functions on tensors, with no model or config, and no process group except in `resharding/execute`.

attention         Attention with fewer key heads than query heads, by the kernels of the device
batching          Splits rows of different length into micro-batches, and balances them over processes
context_shards    Context parallelism of a packed line: tokens and keys of each rank
counter_rng       Counter-based random numbers: sampling noise as a pure function of its indices
cpu_matmul        Float32 matrix products of a CPU by oneDNN instead of MKL, and packed weights for decoding
determinism       Operations that are repeatable although torch does not call their kernels deterministic
logprobs          Log-probabilities and entropies of response tokens
loss_aggregation  Loss aggregation
masking           Sums, means and whitening over the True entries of a mask, and means within groups of rows
packing           Packing: rows of different length as one line of tokens without padding
resharding/       Layouts of sharded tensors, and the plan and exchange that take tensors from one layout to another
sampling          Top-k and top-p filtering, and inverse-CDF sampling from one uniform number per row
varlen_attention  Attention of a packed line by the variable-length flash kernel of torch
"""
