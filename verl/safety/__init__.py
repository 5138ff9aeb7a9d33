"""What watches a run: numbers that are not finite, and spikes; both with the batch that caused them."""
