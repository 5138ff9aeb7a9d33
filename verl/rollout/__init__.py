"""Prompts in; responses and their log-probabilities out."""
