"""A Hugging Face model that trains and generates on one set of weights, for scripts with a loop of their own.

actor          HybridActor: one set of weights that trains by your own loop and generates through verl's rollout
call           A call of `generate` with the arguments of transformers, in terms of the rollout engines
ends           How a call of `generate` wants responses to end, in the words that every rollout engine reads
lock           One call at a time: an actor's model has one state, and its engine one set of options
model_changes  What a rollout engine was built for and what was proven of a model
processes      A HybridActor in several processes, which torchrun or the user has started
settings       What a HybridActor may be told of its layout and its memory: the keys of `hybrid_config`
switch         What it costs to go from training to generating and back, against loading the weights anew
"""
