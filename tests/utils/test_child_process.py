"""Of a log, only what tells of the end is shown; of an end, how it came."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils.child_process import process
from verl.utils.child_process.process import describe_exit, excerpt, log_size, memory_kills

WELL = """\
(MainProcess pid=6683) INFO 11-22 15:42:25 [core.py:402] init engine (profile, create kv cache) took 0.05 s
(MainProcess pid=6683) WARNING 11-22 15:42:25 [base.py:380] Chat template warmup failed
(MainProcess pid=6683) WARNING 11-22 15:42:25 [base.py:380] Traceback (most recent call last):
(MainProcess pid=6683) WARNING 11-22 15:42:25 [base.py:380]   File "base.py", line 373, in warmup
(MainProcess pid=6683) WARNING 11-22 15:42:25 [base.py:380]     self.render_chat([[{"role": "user"}]], chat_params)
(MainProcess pid=6683) WARNING 11-22 15:42:25 [base.py:380] ValueError: Tokenizer not available
[W1122 15:42:23.012873694 utils.cpp:68] Warning: NUMA binding (function init_cpu_memory_env)
W1122 15:42:23.012000 4711 torch/_inductor/x.py:10] [0/0] slow
2026-11-22 15:42:23,123 - torch - WARNING - slow
/site-packages/vllm/dispatcher.py:138: FutureWarning: `torch.distributed.reduce_op` is deprecated
  if hasattr(value, "__dict__"):
Exception ignored in: <function ShmRingBuffer.__del__ at 0x7f>
Traceback (most recent call last):
  File "shm_broadcast.py", line 12, in __del__
    self.shared_memory.unlink()
FileNotFoundError: [Errno 2] No such file or directory: '/psm_1'

"""
WORKER = """\
(Worker_TP1 pid=7) ERROR 11-22 15:42:25 [multiproc_executor.py:871] WorkerProc failed to start.
(Worker_TP1 pid=7) ERROR 11-22 15:42:25 [multiproc_executor.py:871] Traceback (most recent call last):
(Worker_TP1 pid=7) ERROR 11-22 15:42:25 [multiproc_executor.py:871]   File "worker.py", line 1, in load
(Worker_TP1 pid=7) ERROR 11-22 15:42:25 [multiproc_executor.py:871] KeyError: 'rope'
(Worker_TP1 pid=7) INFO 11-22 15:42:25 [x.py:1] bye
"""
CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in one
OSError: the disk

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2, in two
RuntimeError: no model
"""


def in_file(path, text: str):
    path.write_text(text)
    return path


def test_a_process_that_was_well_until_it_was_killed_has_nothing_to_tell(tmp_path):
    assert excerpt(in_file(tmp_path / "log", WELL)) == process.LogExcerpt()


def test_the_traceback_that_ended_it_is_shown_with_those_it_came_from_and_named(tmp_path):
    found = excerpt(in_file(tmp_path / "log", CHAINED.replace("model", "first") + "end of one\n" + WELL + CHAINED))
    assert found.cause == "RuntimeError: no model"
    assert list(found.lines) == [line for line in CHAINED.splitlines() if line]


def test_an_error_that_a_worker_logged_counts_as_one(tmp_path):
    found = excerpt(in_file(tmp_path / "log", WELL + WORKER))
    assert found.cause == "KeyError: 'rope'"
    assert found.lines[0] == "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("raise ValueError('bad'); # told", "ValueError: bad"),
        ("import faulthandler, os; faulthandler.enable(); os.abort()", "Fatal Python error: Aborted"),
    ],
)
def test_the_end_of_a_real_process_is_told_by_its_own_words(program, cause, tmp_path):
    log = tmp_path / "log"
    log.write_text("RuntimeError: of another process\n")
    start = log_size(log)
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, stderr=file)
    found = excerpt(log, start)
    assert found.cause == cause
    assert not any("another process" in line for line in found.lines)
    with log.open("rb") as file:
        assert excerpt(file.fileno(), start) == found


def test_a_c_plus_plus_abort_is_told_in_one_line(tmp_path):
    text = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    found = excerpt(in_file(tmp_path / "log", WELL + text))
    assert found.cause == "terminate called after throwing an instance of 'std::bad_alloc' what():  std::bad_alloc"


def test_a_log_that_is_not_there_is_told_and_a_long_cause_loses_its_middle(tmp_path):
    assert "cannot be read" in excerpt(tmp_path / "none").lines[0]
    deep = "".join(f'  File "a.py", line {i}, in f\n' for i in range(500))
    found = excerpt(in_file(tmp_path / "log", f"Traceback (most recent call last):\n{deep}RecursionError: deep\n"))
    assert len(found.lines) == process.TRACEBACK_LINES + 1
    assert found.lines[-1] == found.cause == "RecursionError: deep"


def test_ends_are_named_and_lack_of_memory_is_told_from_a_signal_that_was_sent(monkeypatch):
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-11) == "signal SIGSEGV"
    assert describe_exit(-9) == "signal SIGKILL (out of memory, unless somebody sent it)"
    monkeypatch.setattr(process, "memory_kills", lambda: 5)
    assert "sent by another process" in describe_exit(-9, 5)
    assert describe_exit(-9, 4).startswith("signal SIGKILL: out of memory")
    monkeypatch.undo()
    assert (memory_kills() or 0) >= 0


MAIN = """
import atexit, sys, threading, time
from verl.utils.child_process.interpreter import run_main

left_open, binary = open("text", "w"), open("bytes", "wb")

def late():
    time.sleep(0.2)
    left_open.write(" by a thread")

def main():
    left_open.write("written")
    binary.write(b"written")
    atexit.register(lambda: print("closed"))
    threading.Thread(target=late).start()
    sys.exit({status})

run_main(main)
"""


@pytest.mark.parametrize(
    ("status", "code", "said"), [("", 0, ""), ("7", 7, ""), ("-1", 255, ""), ("'why'", 1, "why\n")]
)
def test_a_main_program_ends_as_by_the_interpreter(status, code, said, fork_server, tmp_path):
    Path("main.py").write_text(MAIN.format(status=status))
    done = fork_server.run([tmp_path / "main.py"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "closed\n", said)
    assert Path("text").read_text() == "written by a thread"
    assert Path("bytes").read_text() == "written"
