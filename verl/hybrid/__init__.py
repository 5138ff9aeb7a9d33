"""A Hugging Face model that trains and generates on one set of weights, for scripts with a loop of their own.

actor              HybridActor: one set of weights that trains by your own loop and generates through verl's
benchmark          The cost of switching from training to generating and back
generation_config  The arguments of `generate` (transformers' GenerationConfig) as a request to the rollout
model_changes      What a rollout engine was built for, what was proven of a model
parallel           A HybridActor in several processes, which torchrun or the user has started
"""
