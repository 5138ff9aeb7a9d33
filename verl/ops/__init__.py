"""Pure functions on tensors, from masks and log-probabilities to sampling, with no process group, model or config."""
