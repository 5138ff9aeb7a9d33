"""The console command `verl`.

checkpoint         `verl checkpoint`: look at checkpoints. What changes a directory is in `checkpoint_upkeep.py`
checkpoint_compat  The console command `verl-checkpoint-compat`, also `python -m verl.cli.checkpoint_compat`
checkpoint_report  What `verl checkpoint inspect` and `diff` print
checkpoint_store   `verl checkpoint pull` and `push`
checkpoint_upkeep  `verl checkpoint pin`, `unpin`, `gc`, `export`, `materialize`: what keeps
legs               The runs that a check of resuming consists of: each the main script in a process of its own
lineage            `verl lineage`: which run came from which checkpoint of which run, as a tree or as JSON
main               The console command `verl`
models             `verl env --models`: which ways of running a model are used for it, and why others are not
output             How commands speak: tables, JSON, sizes, one line for an error, and the exit status
policy             `verl eval` and `verl generate`: what a saved policy answers, and how good that is
resume_check       `verl resume-check`: is a run that stops and is resumed the run that never stopped?
samples            `verl samples`: browse the rollouts of a run, as a table, one prompt across steps, as JSON
samples_page       Samples as one HTML page that needs nothing else: a table to sort, to filter
samples_read       Rollouts of a run as plain rows: those of its replay buffer
topology_check     `verl resume-check --topology 1,2:fsdp,4:tp_fsdp,2:ray,1`
topology_leg       A leg of `verl resume-check --topology`: the main script
"""
