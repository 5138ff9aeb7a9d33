"""The training loop and the algorithms that run in it.

api/             Trainers for scripts and notebooks: models, data and rewards passed as objects
config           Settings of a run that belong to no single component: how long, how often, how many
local_trainer    PPO from a script or a notebook: one short file, everything in this process, no Ray
plan/            What a run will take in memory, time and disk, before anything is loaded
ppo              Policy optimisation: the steps of PPO, GRPO and similar algorithms, as the papers describe them
ppo_config       PPORun: a policy-gradient run with the checks across its components
ppo_description  PPODescription: the components of a policy-gradient run, and what follows from several of them
ppo_lifecycle    Building, restoring, saving and closing a policy-gradient run
ray_trainer      PPO from a script or a notebook with the roles in Ray actors, one by one or all of them
rollout_pipeline The queue between generation and training: one-step-off-policy rollout at depth 1
setup            LoopTrainer: set-up and tear-down that all trainers share, and restarts after lost workers
sft              Trainers on rows of a data set: supervised fine-tuning, preferences (DPO), reward models
state/           What a run saves and how it resumes: train state, saving, resume, identity, lineage
timers           Timers of a step's stages, and torch's profiler for a few steps
train_loop       The training loop around every trainer: data order, evaluation, progress, saving
"""
