"""What watches a run: numbers that are not finite, log-probs that are not the trainer's, spikes; with the batch behind."""
