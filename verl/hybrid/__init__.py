"""A Hugging Face model that trains and generates on one set of weights, for scripts with their own training loop.

actor              HybridActor: one set of weights that trains by your own loop and generates through verl's
benchmark          The cost of switching from training to generating and back
generation_config  The arguments of `generate` (transformers' GenerationConfig) as a request to the rollout
model_changes      Detects changes of a model after a rollout engine was built for it or checks passed
parallel           A HybridActor over several processes, started by torchrun or the user
"""
