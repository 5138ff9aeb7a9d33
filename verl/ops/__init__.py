"""Pure functions on tensors, with no process group, model or config.

aggregate      From losses per token to one scalar that does not depend on how the batch is cut
batching       How rows of different length are cut into micro-batches and divided among processes
groups         Numbers compared within groups of rows, in which equal numbers differ by exactly zero
kl_estimators  Estimates per token of KL(pi || ref), in nats, from tokens that pi sampled
log_prob_gap   Distance between the log-probs of the engine that sampled and those of the trainer
logprobs       Log-probabilities and entropies of response tokens
masking        Sums, means and whitening over the True entries of a mask
noise          Sampling noise as a pure function of what is being sampled, never of batch, order
packing        Rows of different length as one line of tokens without padding
sampling       From logits and one uniform number per row to a token: top-k
"""
