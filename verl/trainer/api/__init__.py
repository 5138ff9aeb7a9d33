"""Trainers for scripts and notebooks: models, data and rewards passed as objects.

from_objects     User objects in place of configuration: models, rewards and data
load_checkpoint  Loading a checkpoint into a running trainer
pipeline         DataPipeline and RLTrainer: a run declared by its components, and trained with one call
trainer          Trainer: policy optimisation from a script or a notebook, with models
"""
