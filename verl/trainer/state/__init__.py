"""State of a run and its resume: train state, saving, resume, identity, lineage.

checkpointing      Checkpointing while training: when a save is due, what is in it, what became of it
compare_runs       Comparison of two runs: the metrics of each step, and everything in their last checkpoints
distributed_save   Distributed save: every process of a role writes its own part, and the driver commits
driver_state       Driver state: what the driver holds, as a dictionary of parts with state_dict and load_state_dict
lineage            Lineage: which run came from which checkpoint of which run
resume             Resuming: may this configuration continue a checkpoint, in what do the two differ
run_date           The day that chat templates write: of the run, also after a resume
run_directory      Ownership of a run directory: which run has trained there
save_directory     Save directory: where a run saves, and which checkpoint it resumes from
train_state        Train state in a checkpoint: the roles, frozen models, and the driver's parts
training_identity  Training identity: model, tokenizer, data and algorithm, which a resume must not change
"""
