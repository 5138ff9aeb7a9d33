"""Sandboxes: code that a model wrote runs apart from this process, within limits of time, memory and output.

base         What a sandbox is: one call that runs a Python program, and what became of it
jail         Jails on this machine, made by bubblewrap: what one consists of, and whether this machine can make one
jail_init    The first process of a jail
jail_pool    A pool of jails that stand ready
remote       A sandbox server over HTTP, as E2B has it
seccomp      The system calls that a jail does without
unprotected  No sandbox: a process of this user with limits of time and memory
"""
