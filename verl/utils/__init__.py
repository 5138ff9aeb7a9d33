"""What every layer may use.

child_process   Child processes: ended whatever state they are in
device_memory   Memory as the device counts it: how much is in use, and giving back what is only kept for later
env_check       Whether this environment can run verl: each requirement on one line
exits           What a component raises to end the whole program becomes an error that names the line
kernel_cache    Where torch keeps the kernels that it compiles: beside verl's other caches, not in TMPDIR
memory          Main memory of this run: how much it and what it started have taken, and giving back what is free
orphan_cleanup  Clean-up after a process that was killed
process_exit    How a child process ended, and which lines of its log tell why
progress        Progress of a working process, as a process that waits for it sees it
redact          Keep secrets out of what is printed, logged and saved: secret environment variables, keys
saved_targets   `_target_`s that configurations saved by earlier versions name, and what they are called now
seeding         Seeds: every random number of a run derives from one integer and the name of its use
temporary       Temporary directories that a process which is killed leaves to nobody
torchrun        What torchrun has told this process of its place among those that it started
"""
