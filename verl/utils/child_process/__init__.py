"""Child processes: one way to start, communicate with, watch and end them.

channel        Messages and open files between a process and its child
exit_report    Exit status or signal of a process, and the relevant lines of its log
interpreter    Faster start and end of Python processes that import torch
process        `ChildProcess`, the parent's side of a child, and `run_child`, the child's main program
supervisor     Script: runs a command, and ends all processes that it has started when it or the starter ends
trial          Trials of templates and regular expressions in a child with limits of time and memory
"""
