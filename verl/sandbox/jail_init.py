"""The first process of a jail: waits for one program, runs it in a child process, and exits with it.

It runs inside the jail, where this package is not installed: its source is passed to an interpreter, so it imports only
the standard library. Process 1 is protected from the program: signals do not reach it, and seccomp forbids ptrace.

    driver <── R: ready ── this process <── program, files, channel ── driver
                           this process ── fork ──> limits, then the program as __main__
    driver <── wait status and CPU seconds ──┘
"""

import _socket  # `socket` imports much more, and each jail would take that time
import marshal
import os
import resource
import signal
import sys

CONTROL_FD, CHANNEL_FD = 9, 3


def pieces(fd: int, size: int):
    """Yield `size` received bytes; if they end early, the driver has ended."""
    while size:
        piece = os.read(fd, min(size, 1 << 20))
        if not piece:
            os._exit(0)
        size -= len(piece)
        yield piece


def receive(fd: int) -> dict:
    """Receive the program, which is preceded by its length in 8 bytes."""
    length = int.from_bytes(b"".join(pieces(fd, 8)), "little")
    return marshal.loads(b"".join(pieces(fd, length)))


def receive_files(fd: int, files: list) -> None:
    """Write the files, whose contents follow one another. If one does not fit, report this and end the jail: the
    program is not at fault."""
    for name, size in files:
        try:
            if os.path.dirname(name):
                os.makedirs(os.path.dirname(name), exist_ok=True)
            with open(name, "wb") as file:
                for piece in pieces(fd, size):
                    file.write(piece)
        except OSError as error:
            os.write(fd, b"F" + f"{name!r} of {size} bytes: {error.strerror}".encode("utf-8", "replace"))
            os._exit(0)


def receive_channel(fd: int) -> None:
    """Receive a socket and give it the file descriptor 3; keeps `fd`."""
    control = _socket.socket(fileno=os.dup(fd))
    _, ancillary, _, _ = control.recvmsg(1, _socket.CMSG_LEN(4))
    control.close()
    channel = int.from_bytes(ancillary[0][2], sys.byteorder)
    if channel != CHANNEL_FD:
        os.dup2(channel, CHANNEL_FD)
        os.close(channel)


def serve(fd: int) -> dict:
    """Wait for a program and fork; returns in the process that runs it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(3, fd)
    os.closerange(fd + 1, 1024)
    if fd != CONTROL_FD:
        os.dup2(fd, CONTROL_FD)
        os.close(fd)
        fd = CONTROL_FD
    try:
        os.write(fd, b"R")
        program = receive(fd)
        receive_files(fd, program["files"])
        if program["has_channel"]:
            receive_channel(fd)
    except (OSError, EOFError, ValueError):
        os._exit(0)  # the driver has ended, or does not need this jail
    child = os.fork()
    if child == 0:
        os.close(fd)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return program
    for stream in (0, 1, 2, CHANNEL_FD) if program["has_channel"] else (0, 1, 2):
        os.close(stream)
    while True:
        ended, status, usage = os.wait4(-1, 0)  # orphans of the program come here too
        if ended == child:
            break
    os.write(fd, b"%d %f" % (status, usage.ru_utime + usage.ru_stime))
    os._exit(0)  # and the kernel ends what the program has left running


def run(program: dict) -> None:
    """Run the program as `__main__`, with hard limits; tracebacks start at the program's own lines."""
    import sys  # a local name: the module's own names are deleted below

    for name, value in program["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    main = globals()
    for name in [name for name in main if name != "__builtins__"]:
        del main[name]
    main.update({"__name__": "__main__", "__file__": "main.py"})
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
