"""Proof that a rollout engine holds the trainer's weights."""
