"""Utilities that every layer may import.

child_process        Child processes, which end with their parent
directories          Temporary directories that are removed even if their process is killed, and the cache of verl
env_check            Whether this environment can run verl: each requirement on one line
external_input       Validation of names, paths and JSON that are read from disk or storage
main_memory          Main memory: what is free, and what the C library keeps of freed tensors
memory               Memory of devices and processes: usage, peak, and release of cached memory
orphan_cleanup       Clean-up after a killed process
progress             Progress of a process in shared memory, for deadlines of processes that wait for it
redact               Redacts secrets from output, logs and files
seeding              Seeds: all random numbers derive from one integer and the name of their use
signals              Signals, the first of which finishes and saves the step; `exit()` in component code
threads              The number of threads of a run on a CPU, measured
torchrun             Runs that torchrun has started, which are refused
"""
