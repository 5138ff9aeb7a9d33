"""A Hugging Face model that trains and generates on one set of weights, for scripts with their own training loop.

actor               HybridActor: one set of weights that trains by your own loop and generates through verl's
benchmark           The cost of switching from training to generating and back
generate_options    Arguments of `generate`, those of transformers, for the rollout engines
parallel            A HybridActor over several processes, started by torchrun or the user
"""
