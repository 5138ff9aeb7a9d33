"""A Hugging Face model that trains and generates on one set of weights, for scripts with their own training loop.

actor              HybridActor: one set of weights that trains by your own loop and generates through verl's
benchmark          The cost of switching from training to generating and back
generation_config  The arguments of `generate` (transformers' GenerationConfig) as a request to the rollout
model_changes      The form of a model, which is fixed when an actor is made, and what an engine cannot reproduce
parallel           A HybridActor over several processes, started by torchrun or the user
"""
