"""Sandboxes: run code that a model wrote outside of this process, with limits on time, memory and output.

base          Interface of sandboxes: run a Python program and return its outcome
jail          Jails on this machine, made by bubblewrap and started in advance: one for each program
jail_command  The command that makes a jail: its contents, system calls, and whether this machine supports it
jail_init     The first process of a jail
unit_tests    Unit tests of a program that runs in another process than the tests
unprotected   No sandbox: a process of this user with limits of time and memory
"""
