"""The training loop and the algorithms that run in it.

api/             Trainers for scripts and notebooks: models, data and rewards passed as objects
build            The components of a policy-gradient run, and how its trainer is built in five phases
config           Settings of a run that belong to no single component: how long, how often, how many
guards           Hooks around the stages of a step: checks of numbers, injected faults
local_trainer    PPO from a script or a notebook: one short file, everything in this process, no Ray
plan/            Memory, time and disk space of a run, before anything is loaded
ppo              Policy optimisation: the steps of PPO, GRPO and similar algorithms, as the papers describe them
ppo_config       PPORun: a policy-gradient run with the checks across its components
ray_trainer      PPO from a script or a notebook with the roles in Ray actors, one by one or all of them
sampling         Responses to the prompts of a step: the queue between generation and training, dynamic sampling
setup            Set-up shared by all trainers, with checks: process settings, saving, processes
sft              Trainers on rows of a data set: supervised fine-tuning, preferences (DPO), reward models
state/           What a run saves and how it resumes: train state, saving, resume, identity, lineage
timers           Timers of a step's stages, and torch's profiler for a few steps
train_loop       The training loop and the base class of trainers; restarts after lost workers
"""
