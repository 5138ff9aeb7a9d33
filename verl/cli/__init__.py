"""The console command `verl`.

checkpoint         `verl checkpoint`: list, inspect, verify, export, push, pull
checkpoint_compat  `verl-checkpoint-compat`: which checkpoints another version could not read
console            Console output of commands: JSON, sizes, one line for an error, and the exit status
generate           `verl eval`, `verl generate` and `verl serve-policy`: evaluates, samples or serves a saved policy
hub                The upload of an exported model to the Hugging Face hub
main               The console command `verl`, and `verl env`
plan               `verl plan`: memory, time and disk of a run, before anything is loaded
report             `verl report`, and the tracker that writes its page: a run, or several to compare them
resume_check       `verl resume-check`: does a resumed run give the same numbers as a run without a stop?
runs               `verl runs`, `verl diff` and `verl lineage`: runs of a directory, differences, origins
serve_training     `verl serve-training`: training as a service, in the protocol of Tinker's SDK
train              The commands that train: one for each root (`verl ppo`, `verl sft`, ...), and `verl quickstart`
"""
