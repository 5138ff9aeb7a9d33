"""Weights on their way from where they train to where they are used, and the proof that they arrived."""
