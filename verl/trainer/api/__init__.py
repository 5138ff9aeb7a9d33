"""Trainers for scripts and notebooks: models, data and rewards passed as objects.

base             Base of the trainers for scripts and notebooks: one step, all steps, checkpoints, another reward
from_objects     Objects of the user in place of configuration: models, rewards and data
load_checkpoint  Loading a checkpoint into a running trainer
trainer          Trainer: policy optimisation from a script or a notebook, with models
"""
