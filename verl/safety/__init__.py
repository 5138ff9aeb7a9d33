"""What watches a run: numbers that are not finite, spikes, log-probs that are not the trainer's; with their batches."""
