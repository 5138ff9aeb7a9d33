"""Child processes: started, spoken to, watched and ended in one way, whatever they do.

channel        Messages and open files between a process and its child
exit_report    How a process ended, and which lines of its log say why
interpreter    Start and end of a Python process that imports torch, without needless work
process        `ChildProcess`, the parent's side of a child, and `run_child`, the child's main program
stopped_watch  Stopped processes
"""
