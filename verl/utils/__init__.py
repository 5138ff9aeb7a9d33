"""Utilities that every layer may import.

child_process        Child processes, which end with their parent
component_exits      `exit()` in component code becomes an error
deadline             Deadlines of calls, which count only time in which the event loop ran
env_check            Whether this environment can run verl: each requirement on one line
external_input       Validation of names, paths and JSON that are read from disk or storage
kernel_cache         Directory of compiled kernels of torch, in the cache of verl instead of TMPDIR
memory               Device and main memory: usage, peak, limits (`ulimit -v`), and release of cached memory
orphan_cleanup       Clean-up after a killed process
progress             Progress of a process in shared memory, for deadlines of processes that wait for it
redact               Redacts secrets from output, logs and files
seeding              Seeds: all random numbers derive from one integer and the name of their use
signals              Signals: the first SIGINT, SIGTERM or SIGHUP finishes and saves the step, the second ends the run
temporary_directory  Temporary directories that are removed even if their process is killed
torchrun             The environment variables that torchrun sets for each of its processes
"""
