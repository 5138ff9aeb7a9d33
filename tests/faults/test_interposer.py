"""The interposer sees every file call of a process, and strikes the one that it was told to."""

import json
import subprocess
import sys

import pytest
from faults.calls import Strike, environment, recorded
from faults.power_cut import Trace, fingerprint, snapshot
from faults.scenarios import fast_directory

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, sys
from pathlib import Path
from faults.calls import Interposer, Strike

base, log, at, kind, code = sys.argv[1:]
root = Path(base) / "run"
outside = Path(log).open("ab", buffering=0)
interposer = Interposer()
interposer.arm(Path(base), Strike(int(at), kind, int(code)), outside.fileno())
error = None
try:
    root.mkdir()                                                # call 0
    with open(root / "one", "wb", buffering=0) as file:         # 1 create
        file.write(b"0123456789")                               # 2
        os.fsync(file.fileno())                                 # 3, 4 is its close
    os.chdir(root)
    with open("../run/./one", "ab") as file:                    # 5
        file.write(b"tail")                                     # 6 as it is closed, 7
    fd = os.open("two", os.O_RDWR | os.O_CREAT)                 # 8
    os.pwrite(fd, b"abc", 5)                                    # 9
    os.writev(fd, [b"de", b"", b"fg"])                          # 10
    os.ftruncate(fd, 20)                                        # 11
    os.truncate("two", 6)                                       # 12
    os.rename("two", "three")                                   # 13
    os.write(fd, b"!")                                          # 14 under its new name
    os.close(fd)                                                # 15
    os.link("one", "four")                                      # 16
    os.symlink("four", "five")                                  # 17
    directory = os.open(".", os.O_RDONLY)
    os.mkdir("inner", dir_fd=directory)                         # 18
    os.rename("one", "inner/one", dst_dir_fd=directory)         # 19
    os.mkdir("gone")                                            # 20
    os.rmdir("gone", dir_fd=directory)                          # 21
    os.unlink("four", dir_fd=directory)                         # 22
    os.fsync(directory)                                         # 23
    open("five.txt", "w").close()                               # 24, 25
    Path(log + ".outside").write_text("is not counted")
except OSError as raised:
    error = raised.errno
print(json.dumps([interposer.disarm(), error]))
"""
NUM_CALLS = 26


def run(library, base, log, strike=Strike()):  # noqa: B008
    arguments = [str(base), str(log), str(strike.at), strike.kind, str(strike.code)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, env=environment(library), capture_output=True, text=True)


def ran(library, tmp_path, strike):
    """The code, what was printed, and the calls that were made, in a directory of their own."""
    with fast_directory() as base:
        log = tmp_path / "log"
        done = run(library, base.resolve(), log, strike)
        operations = recorded(log)
        trace = Trace.of(base.resolve(), {0: {}}, operations)
        assert fingerprint(trace.disk(trace.steps, set())) == fingerprint(snapshot(base))
    return done.returncode, json.loads(done.stdout or "null"), operations


def test_a_recording_played_again_gives_the_same_files(library, tmp_path):
    code, told, operations = ran(library, tmp_path, Strike())
    assert (code, told, len(operations)) == (0, [NUM_CALLS, None], NUM_CALLS)
    assert [operation.name for operation in operations[:5]] == ["make_directory", "create", "write_at", "sync", "close"]


@pytest.mark.parametrize(("kind", "num_made"), [("kill before", 10), ("kill within", 11), ("kill after", 11)])
def test_a_kill_ends_the_process_at_its_call(library, tmp_path, kind, num_made):
    code, _, operations = ran(library, tmp_path, Strike(10, kind))
    assert (code, len(operations)) == (-9, num_made)
    if kind != "kill before":
        assert operations[10].args[1] == (b"de" if kind == "kill within" else b"defg")
