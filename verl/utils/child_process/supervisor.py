"""Runs a command and ends with all processes that it has started; standard library only, for any interpreter.

    starter ── stdin ──> supervisor.py ── fork, exec ──> command ──> processes that it starts, in any session
                             │
                             └── SIGKILL to all of them, when the command ends or the starter closes its pipe

Usage: `python supervisor.py PROGRAM ARGUMENT ...`. The command has the standard streams of the supervisor and a session
of its own; the supervisor ends with its exit status, or by its signal.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time

LOOK_S = 0.1
END_S = 5.0  # for killed processes to end
PR_SET_CHILD_SUBREAPER = 36


def supervise(process):
    """Wait for the end of the command, or of the starter; then end every process below this one.

    Returns:
        Its exit status, negative for a signal.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    starter = select.poll()
    starter.register(0, 0)  # reports when the other end is closed
    status = None
    while status is None and not starter.poll(LOOK_S * 1000):
        status = reaped(process)
    deadline = time.monotonic() + END_S
    while (children := children_of(os.getpid())) and time.monotonic() < deadline:
        for child in children:  # what they have started becomes a child of this process
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
        late_status = reaped(process)
        status = late_status if status is None else status
    return status or 0


def reaped(process):
    """Reap children that have ended.

    Returns:
        The exit status of `process`, negative for a signal, if it is among them; else None.
    """
    status = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == process:
                status = -os.WTERMSIG(ended[1]) if os.WIFSIGNALED(ended[1]) else os.WEXITSTATUS(ended[1])
    except ChildProcessError:
        pass
    return status


def children_of(parent):
    """Process ids of the children of a process, ended ones included; empty where the system does not tell."""
    processes = []
    for name in os.listdir("/proc") if os.path.exists("/proc/self/stat") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:  # it is gone
                continue
            if int(fields[1]) == parent:
                processes.append(int(name))
    return processes


def main():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = os.fork()
    if not process:
        os.setsid()
        os.execv(sys.argv[1], sys.argv[1:])
    status = supervise(process)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
