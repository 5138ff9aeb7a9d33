"""What every layer may use.

child_process        Child processes: ended whatever state they are in, ending with their parent
component_exits      Exits of components
env_check            Whether this environment can run verl: each requirement on one line
external_input       Names, paths and JSON from a disk or a store, taken into checked types at one place
kernel_cache         Where torch keeps the kernels that it compiles: beside verl's other caches, not in TMPDIR
memory               Device memory and main memory: how much is in use, the peak, and giving back what is free
orphan_cleanup       Clean-up after a killed process
progress             Progress of a working process, as a process that waits for it sees it
redact               Keep secrets out of what is printed, logged and saved: secret environment variables, keys
saved_targets        `_target_`s that configurations saved by earlier versions name, and what they are called now
seeding              Seeds: every random number of a run derives from one integer and the name of its use
signals              Signals: asked to stop, the step under way is finished and saved first; asked again
temporary_directory  Temporary directories that are removed even if their process is killed
torchrun             The environment variables that torchrun sets for each of its processes
"""
