"""Weights on their way from where they train to where they are used."""
