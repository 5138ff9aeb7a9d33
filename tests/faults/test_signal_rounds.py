"""Every kind of process of a run is killed and stopped at random moments of real trainings, again and again.

Each round ends as the twin that nobody disturbed, or in words with a status other than 0 and then, started again, as
the twin; and leaves no process, nothing in /dev/shm, and nothing in TMPDIR. The engine of `rollout=vllm` has rounds of
its own.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults.courses import COURSES, first_difference, steps_saved
from faults.fork_server import Child, ForkServer

pytestmark = [pytest.mark.xdist_group("fork server"), pytest.mark.exhaustive, pytest.mark.slow]

STEPS = 6
LIMIT_S = 240.0  # far longer than any round takes: a run that is still there then hangs
MARK = "VERL_SIGNAL_ROUND"
SERVER = Path(__file__).with_name("reward_server.py")
# What a run that a signal has ended says of it.
WORDS = (
    r"WorkerDied: rank \d failed|WorkerHung: rank \d failed|the process ended with signal SIGKILL|"
    r"no answer within timeout_s|the server seems to be gone|All connection attempts failed|"
    r"a worker process could not import it|ConnectError|ReadError|RemoteProtocolError"
)


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    Attributes:
        overrides: beside those of the course `ppo`.
        victims: marks in the commands of processes that may be struck; `trainer` and `server` stand for themselves.
    """

    overrides: tuple[str, ...]
    victims: tuple[str, ...]


SAMPLES = "def score(prompt, response):\n    return float(len(set(response)))\n"
ASIDE = ("checkpoint.writer_timeout_s=3",)
KINDS = {
    "alone": Kind(
        ("storage=local", "storage.path=HERE/bucket"), ("trainer", "writer_process", "orphan_cleanup")
    ),
    "rewards in processes": Kind(
        ("reward=function", "reward.path=HERE/samples.py:score", "reward.per_sample=true", "reward.num_workers=2",
         "reward.timeout_s=3"),
        ("trainer", "pool_worker", "pool_worker", "pool_worker"),
    ),
    "sharded": Kind(
        ("sharding=ddp", "trainer.n_gpus_per_node=2", "sharding.call_timeout_s=6", "sharding.timeout_s=60"),
        ("trainer", "cluster.worker", "cluster.worker", "writer_process"),
    ),
    "reward server": Kind(
        ("reward=remote_http", "reward.endpoint.base_url=SERVER", "reward.endpoint.timeout_s=2",
         "reward.endpoint.retries=1", "reward.endpoint.backoff_s=0.01"),
        ("trainer", "server", "server", "server"),
    ),
}  # fmt: skip


class Place:
    """Where the rounds run: a server that starts trainers, with a TMPDIR and a /dev/shm that nobody else uses."""

    def __init__(self, base: Path, model: Path, server: ForkServer, temporary: Path):
        self.base, self.model, self._server, self.temporary = base, model, server, temporary
        assert server.process is not None
        self._own = server.process.pid
        self._is_alone = Path(f"/proc/{self._own}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()
        self._before = set(self._shared_memory())
        self._twins: dict[str, Path] = {}

    def start(self, kind: str, directory: Path, name: str, port: int | None) -> Child:
        directory.mkdir(exist_ok=True)
        (directory / "samples.py").write_text(SAMPLES)
        own = [
            text.replace("HERE", str(directory)).replace("SERVER", f"http://127.0.0.1:{port}")
            for text in (*KINDS[kind].overrides, *ASIDE)
        ]
        chosen = any(text.startswith("reward=") for text in own)
        arguments = COURSES["ppo"].arguments(self.model, directory, STEPS)
        kept = [text for text in arguments if not (chosen and re.match(r"reward(\.|=)", text))]
        return self._server.start(directory, name, [*kept, *own])

    def twin(self, kind: str) -> Path:
        """The training of this kind that nobody disturbs."""
        if kind not in self._twins:
            directory = self.base / f"twin of {kind}".replace(" ", "_")
            with serving() as (port, _):
                child = self.start(kind, directory, "run", port)
                assert child.wait(LIMIT_S) == 0, child.said()
            self.assert_nothing_is_left()
            self._twins[kind] = directory
        return self._twins[kind]

    def processes(self, mark: str = "") -> list[int]:
        """Those that descend from the server, whatever session they are in, and have a mark in their command line."""
        wanted, found = f"{MARK}={os.getpid()}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                is_ours = wanted in (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if is_ours and state != "Z" and mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self._own]

    def assert_nothing_is_left(self) -> None:
        def left() -> tuple:
            memory = sorted(set(self._shared_memory()) - self._before)
            return self.processes(), memory, sorted(path.name for path in self.temporary.iterdir())

        end = time.monotonic() + 60
        while any(left()) and time.monotonic() < end:
            time.sleep(0.05)
        processes, memory, files = left()
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes]
        assert (commands, memory, files) == ([], [], [])

    def _shared_memory(self) -> list[str]:
        if not self._is_alone:  # others use it too
            return []
        return os.listdir(f"/proc/{self._own}/root/dev/shm")


@contextmanager
def serving() -> Iterator[tuple[int, int]]:
    """A scoring service: its port and its process id."""
    process = subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="module")
def place(dir32, tmp_path_factory) -> Iterator[Place]:
    temporary = tmp_path_factory.mktemp("t")
    environment = {MARK: str(os.getpid()), "TMPDIR": str(temporary), "TMP": str(temporary), "TEMP": str(temporary)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        server = ForkServer(prefix=private_shared_memory())
        server.__enter__()
    try:
        yield Place(tmp_path_factory.mktemp("rounds"), dir32, server, temporary)
    finally:
        server.__exit__()


def private_shared_memory() -> list[str]:
    """The words before a command that give it a /dev/shm of its own, where that is allowed."""
    mounted = 'mount -t tmpfs none /dev/shm && exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounted, "sh"]
    done = subprocess.run([*words, "true"], capture_output=True, check=False)
    return words if done.returncode == 0 else []


def strike(place: Place, child: Child, server: int, victim: str, number: int, coin: random.Random) -> bool:
    """Send the signal to a process of the kind; a trainer that was stopped, or a server now and then, goes on later."""
    found = {"trainer": [child.pid], "server": [server]}.get(victim) or place.processes(victim)
    if not found or not child.is_running():
        return False
    pid = coin.choice(sorted(found))
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        if number == signal.SIGSTOP and (victim == "trainer" or (victim == "server" and coin.random() < 0.3)):
            time.sleep(coin.uniform(0.3, 5.0) if victim == "trainer" else coin.uniform(0.1, 1.0))
            os.kill(pid, signal.SIGCONT)
        return True
    return False


def wait_for_steps(child: Child, lines: Path, count: int) -> None:
    end = time.monotonic() + LIMIT_S
    while child.is_running() and time.monotonic() < end:
        if lines.is_file() and lines.read_bytes().count(b"actor/loss") >= count:
            return
        time.sleep(0.005)


def round_of(place: Place, number: int, coin: random.Random, directory: Path) -> tuple[str, str] | None:
    """Start a training, strike once, and see it to its end. Returns who was struck and how it ended, if anybody was."""
    kind = coin.choice(sorted(KINDS))
    victim = coin.choice(KINDS[kind].victims)
    twin = place.twin(kind)
    with serving() as (port, server):
        child = place.start(kind, directory, "run_1", port)
        wait_for_steps(child, directory / "run_1/metrics.jsonl", coin.randint(0, STEPS - 2))
        time.sleep(coin.uniform(0.0, 0.3))
        was_struck = strike(place, child, server, victim, number, coin)
        status, said = child.wait(LIMIT_S), child.said()
    place.assert_nothing_is_left()
    if not was_struck:
        assert status == 0, said
        return None
    ending = "went on to its end"
    if status != 0:
        is_killed_trainer = victim == "trainer" and number == signal.SIGKILL
        assert status == -signal.SIGKILL if is_killed_trainer else re.search(WORDS, said), f"{victim}: {said}"
        ending = "was killed" if is_killed_trainer else "ended in words"
        with serving() as (port, _):
            again = place.start(kind, directory, "run_2", port)
            assert again.wait(LIMIT_S) == 0, again.said()
        place.assert_nothing_is_left()
    assert first_difference(twin, directory, without=("reward/remote_",)) is None
    assert STEPS in steps_saved(directory)
    return victim, ending


@pytest.mark.parametrize(
    ("number", "rounds", "seed"), [(signal.SIGKILL, 60, 1), (signal.SIGSTOP, 35, 2)], ids=["killed", "stopped"]
)
def test_whatever_process_is_struck_the_run_goes_on_or_ends_in_words_and_leaves_nothing(
    number, rounds, seed, place, record_property
):
    rounds = int(os.environ.get("VERL_SIGNAL_ROUNDS", str(rounds)))
    coin, found = random.Random(int(os.environ.get("VERL_SIGNAL_SEED", str(seed)))), Counter[tuple[str, str]]()
    for attempt in range(3 * rounds):
        if sum(found.values()) == rounds:
            break
        if (struck := round_of(place, number, coin, place.base / f"{number}_{attempt}")) is not None:
            found[struck] += 1
    record_property("fault_cases", sum(found.values()))
    told = ", ".join(f"{who}: {count} {how}" for (who, how), count in sorted(found.items()))
    record_property("told", f"{sum(found.values())} processes {signal.Signals(number).name}: {told}")
    assert sum(found.values()) == rounds
