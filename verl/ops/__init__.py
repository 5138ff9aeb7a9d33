"""Pure functions on tensors, with no model or config, and no process group except in `resharding/execute`.

attention         Attention by the kernels of the device: grouped queries, packed lines without a mask
batching          Rows of different length: split into micro-batches, and partitioned among processes
context_shards    Context parallelism of a packed line: tokens and keys of each rank
cpu_matmul        Float32 matrix products of a CPU by oneDNN instead of MKL, and packed weights for decoding
logprobs          Log-probabilities and entropies of response tokens
masking           Sums, means and whitening over the True entries of a mask, and loss aggregation
packing           Packing: rows of different length as one line of tokens without padding
resharding/       Layouts of sharded tensors, and the plan and exchange that take tensors from one layout to another
sampling          Counter-based random numbers, top-k and top-p filtering, inverse-CDF sampling
"""
