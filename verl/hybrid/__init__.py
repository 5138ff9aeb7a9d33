"""A Hugging Face model that trains and generates on one set of weights, for scripts with their own training loop.

actor              HybridActor: one set of weights that trains by your own loop and generates through verl's
benchmark          The cost of switching from training to generating and back
engine_faults      Arguments of `generate` for the rollout engines, and models that an engine cannot reproduce
parallel           A HybridActor over several processes, started by torchrun or the user
"""
