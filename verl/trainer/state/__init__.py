"""State of a run and its resume: train state, saving, resume, identity, lineage.

checkpointing      Checkpointing while training: when a save is due, what is in it, what became of it
compare_runs       Comparison of two runs: the metrics of each step, and everything in their last checkpoints
driver_state       Driver state: what the driver holds, as a dictionary of parts
lineage            Lineage: which run came from which checkpoint of which run
run_date           The day that dated chat templates write into prompts
save_directory     Where a run saves, which checkpoint it resumes from, and which run has trained in a run directory
train_state        Train state in a checkpoint: the roles, frozen models, the driver's parts; saves by several processes
training_identity  Training identity, which a resume must not change, and how the configurations of two runs differ
"""
