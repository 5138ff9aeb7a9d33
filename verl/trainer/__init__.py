"""The training loop and the algorithms that run in it.

ahead             Responses of the next step, drawn while this one trains
budget            What a run will take, before any weight is loaded: memory by role and phase, disk, operations
comparing         Whether two runs came to the same: the numbers of each step
contents          What is in a checkpoint: the state of roles, sampler and generators as components
expected_lengths  How long responses to a prompt are likely to be
face              What every trainer offers to a script or a notebook: one step, all steps, checkpoints
forms             Which form an object of the user has, and the description that stands for it: models, rewards
generators        Random generators in a checkpoint: those of the driver
given             Objects of the user in place of configuration
identity          What makes two runs the same training: model, tokenizer, data, algorithm
joint             Saves that the processes of roles write themselves, each its part, and the driver commits
library           Trainer: policy optimisation from a script or a notebook, with models
lineage           Which run came from which checkpoint of which run
lineage_tree      The runs of a directory as trees: which checkpoints each saved
local_trainer     PPO from a script or a notebook: one short file, everything in this process, no Ray
loop              The loop around every trainer: data order, evaluation, progress, saving, and an orderly end
pipeline          DataPipeline and RLTrainer: a run declared by its parts, and one call that carries it out
ppo               Policy optimisation: the algorithm, as it stands in the papers, for PPO, GRPO and their kin
ppo_faults        What is wrong between the components of a policy-gradient run
profiling         Where the time of a few steps goes: torch's profiler
ray_trainer       PPO from a script or a notebook with the roles in Ray actors, one by one or all of them
recovery          A run that loses a worker goes on by itself: from its last checkpoint, with new workers
reloading         A checkpoint loaded into a trainer that is running: all of it
resume            Where a run goes on: which checkpoint `resume=` means
reuse             Rows of earlier steps beside those of this one: what a step takes from the replay buffer
reward_stats      What a reward has learned of scores, in checkpoints: with what it rates by
saving            Saving while training: when a checkpoint is due, what is in it, and what became of it
settings          The settings of a run that belong to no single component: how long, how often, how many, where
setup             What every trainer sets up before its first step, and puts back after its last: device, seeds
sft               Supervised fine-tuning: the likelihood of given completions, in the same loop as PPO
stages            The clock of a step: how long each stage took, and what it did
uploads           Checkpoints on their way to object storage, while training goes on: what arrived, what waits
"""
