"""Child processes: one way to start, communicate with, watch and end them.

channel        Messages and open files between a process and its child
interpreter    Faster start and end of Python processes that import torch
pool           Processes that are started ahead of their use, lent, and replaced when they have ended
process        `ChildProcess`, the parent's side of a child, `run_child`, its main program, and reports of exits
"""
