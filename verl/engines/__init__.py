"""One process's share of a model in training: forward, loss, step."""
