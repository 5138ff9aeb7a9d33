"""Runs one program with limits of time, memory and output, and nothing else. Standard library only: its source is sent
to servers, which may have any Python 3."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile

SPACE_MIB = 64  # of address space, in addition to the program's own
LIMITED = """
import os, resource, sys
if int(sys.argv[3]) >= 0:
    os.dup2(int(sys.argv[3]), 3)
    os.closerange(4, int(sys.argv[3]) + 1)
def limit(name, value):
    resource.setrlimit(name, (value, value))
limit(resource.RLIMIT_AS, int(sys.argv[1]))
limit(resource.RLIMIT_FSIZE, int(sys.argv[2]))
limit(resource.RLIMIT_CORE, 0)
sys.argv, sys.path[:0] = ["main.py"], ["."]
exec(compile(open("main.py", encoding="utf-8").read(), "main.py", "exec"))
"""


def run_limited(files, stdin, timeout_s, memory_mib, most_bytes, channel=None):
    """Write files to a separate directory and run `main.py` there.

    Args:
        files: contents by relative name; stdin: its standard input, in bytes.
        most_bytes: of its output, and of its errors.
        channel: a socket that it gets as file descriptor 3; closed here.
    Returns:
        Exit status, negative for a signal, or None after `timeout_s`; output and errors, cut behind `most_bytes` + 1.
    """
    directory = tempfile.mkdtemp(prefix="verl-program-")
    try:
        for name, content in files.items():
            path = os.path.join(directory, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        fds = () if channel is None else (channel.fileno(),)
        limits = [(memory_mib + SPACE_MIB) * 2**20, most_bytes + 1, *(fds or (-1,))]
        command = [sys.executable, "-I", "-X", "utf8", "-c", LIMITED, *map(str, limits)]
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            source.write(stdin)
            source.seek(0)
            child = subprocess.Popen(
                command, cwd=directory, stdin=source, stdout=out, stderr=err, start_new_session=True, pass_fds=fds
            )
            if channel is not None:
                channel.close()
            status = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(timeout_s)
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)  # processes that it left running in its session
            child.wait()
            out.seek(0)
            err.seek(0)
            return status, out.read(most_bytes + 1), err.read(most_bytes + 1)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
