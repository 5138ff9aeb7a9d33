"""The first process of a jail: waits for one program, runs it in a child process, and exits with it.

It runs inside the jail, where this package is not installed: its source is passed to an interpreter, so it imports only
the standard library. Process 1 is protected from the program: signals do not reach it, and seccomp forbids ptrace.

    driver <── R: ready ── this process <── program ── driver
                           this process ── fork ──> limits, then the program as __main__
    driver <── wait status and CPU seconds ──┘
"""

import marshal
import os
import resource
import signal
import sys


def receive(fd: int) -> dict:
    """Receive the program, which is preceded by its length in 8 bytes."""
    left, pieces = int.from_bytes(os.read(fd, 8), "little"), []
    while left:
        piece = os.read(fd, min(left, 1 << 20))
        if not piece:
            os._exit(0)
        pieces.append(piece)
        left -= len(piece)
    return marshal.loads(b"".join(pieces))


def serve(fd: int) -> dict:
    """Wait for a program and fork; returns in the process that runs it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(3, fd)
    os.closerange(fd + 1, 1024)
    try:
        os.write(fd, b"R")
        program = receive(fd)
    except (OSError, EOFError, ValueError):
        os._exit(0)  # the driver is gone, or has no use for this jail
    child = os.fork()
    if child == 0:
        os.close(fd)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return program
    for stream in (0, 1, 2):
        os.close(stream)
    while True:
        ended, status, usage = os.wait4(-1, 0)  # orphans of the program come here too
        if ended == child:
            break
    os.write(fd, b"%d %f" % (status, usage.ru_utime + usage.ru_stime))
    os._exit(0)  # and the kernel ends what the program has left running


def limit(program: dict) -> None:
    """Set hard resource limits for this process and its children."""
    for name, value in program["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))


def begin(program: dict) -> dict:
    """Prepare this process; returns the globals of the program and its code."""
    for name, content in program["files"].items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
    limit(program)
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    return {"__name__": "__main__", "__builtins__": __builtins__, "__file__": "main.py"}


def run(program: dict) -> None:
    """Run the program as `__main__`; tracebacks start at the program's own lines."""
    import sys  # a name of this function: the module's own names are the program's from here on

    main = globals()
    own = begin(program)
    for name in [name for name in main if name != "__builtins__"]:
        del main[name]
    main.update(own)
    try:
        exec(compile(program["code"], "main.py", "exec"), main)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  what the program raises is the program's
        import linecache
        import traceback

        linecache.cache["main.py"] = (0, None, program["code"].splitlines(True), "main.py")
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        sys.exit(1)


if __name__ == "__main__":
    run(serve(int(sys.argv[1])))
