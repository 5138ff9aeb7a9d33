"""The episode journal: turns of the model and answers of environments, written to disk as they arrive.

    step 12 of a run:   turn sampled ──> journal    environment answers ──> journal    episode ends ──> journal
    killed, resumed:    step 12 is sampled again from the weights of the checkpoint before it; a call that
                        is in the journal is not repeated, or repeated and compared, as `recovery` allows

The key of an answer is a hash of everything that led to it: environment, stream, step, prompt, sample, tokens of the
episode. With other weights the tokens differ, so no answer is found. A line holds a checksum and the records that
arrived together: answers are written before they are used, turns before an environment in another thread is called. An
incomplete last line is ignored. Lines are not synced, so they survive the death of the process, but not a loss of
power.

The values of an environment's `recovery`:

    stateless      answers depend only on the action: answers in the journal are reused
    deterministic  actions are executed again, and every answer must equal the one in the journal
    restart        neither: groups whose episodes had all ended are reused, all others are restarted
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import secrets
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.environments.base import CallRecord, Observation, StepResult
from verl.errors import RolloutError, end_cut

log = logging.getLogger(__name__)

_FILE = re.compile(r"step-(\d+)\.(\d+)\.rank-\d+\.[0-9a-f]+\.jsonl")
_CHECKPOINT = re.compile(r"global_step_(\d+)")
SHOWN = 300  # maximum characters of an answer in a message
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True)
class JournalEntry:
    """A recorded answer of an environment.

    Attributes:
        value: an observation (`reset`) or a `StepResult` (`step`); None if the outcome is not ok.
    """

    record: CallRecord
    value: Observation | StepResult

    @property
    def is_failure(self) -> bool:
        """Whether the call, or a tool in it, failed for a reason that the model did not cause."""
        calls = self.value.calls if isinstance(self.value, StepResult) else ()
        return any(record.outcome == "infra" for record in (self.record, *calls))


class PrefixHash:
    """Incremental hash of an episode up to its current token.

    Attributes:
        num_tokens: number of tokens hashed.
    """

    def __init__(self, digest: Any):
        self._digest, self.num_tokens = digest, 0

    def append(self, tokens: Sequence[int]) -> None:
        self._digest.update(array("q", tokens))
        self.num_tokens += len(tokens)

    def key(self, *position: Any) -> str:
        """The journal key of a position after these tokens."""
        digest = self._digest.copy()
        digest.update(f"{self.num_tokens}{position}".encode())
        return digest.hexdigest()


class EpisodeJournal:
    """The journal of one process for the current step.

    Args:
        directory: next to the checkpoints; shared by all processes of a run and all runs that resume it.
        identity: digest of the environment's settings; answers under other settings are not found.
    Attributes:
        answers, ends: records of earlier processes for this step, by key.
    """

    def __init__(self, directory: Path, identity: str, rank: int):
        self.directory, self._identity, self._rank = directory, identity.encode(), rank
        self._step: int | None = None
        self._file: Any = None
        self.unwritten: list[Mapping[str, Any]] = []  # not written yet
        self.answers: dict[str, JournalEntry] = {}
        self._turns: dict[str, list[int]] = {}
        self.ends: set[str] = set()

    def open(self, step: int) -> None:
        """Start a step and read the records that earlier processes wrote for it."""
        if step == self._step:
            return
        self.close()
        self._step = step
        self.answers, self._turns, self.ends = {}, {}, set()
        files = _files_of(self.directory, step)
        for _, path in files:
            self._load(path)
        self._prune(step)
        life = 1 + max((life for life, _ in files), default=0)
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"step-{step:08d}.{life}.rank-{self._rank}.{secrets.token_hex(4)}.jsonl"
        self._file = open(self.directory / name, "wb", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None
        self._step = None

    def prefix(self, *parts_of_key: Any) -> PrefixHash:
        """The hash of an episode that has no tokens yet, for `PrefixHash.key`."""
        return PrefixHash(hashlib.blake2b(self._identity + repr(parts_of_key).encode(), digest_size=16))

    def write_turn(self, key: str, tokens: Sequence[int]) -> bool:
        """Record a turn of the model; returns whether the journal already has other tokens for it."""
        known = self._turns.get(key)
        if known is None:
            self.unwritten.append({"turn": key, "tokens": list(tokens)})
        return known is not None and known != list(tokens)

    def write_answer(self, key: str, entry: JournalEntry) -> None:
        value, record = entry.value, [*vars(entry.record).values()]
        if isinstance(value, StepResult):
            calls = [[*vars(call).values()] for call in value.calls]
            step = [plain(value.observation), value.reward, bool(value.terminated), bool(value.truncated), calls]
            self.unwritten.append({"answer": key, "record": record, "step": step})
        else:
            self.unwritten.append({"answer": key, "record": record, "reset": plain(value)})

    def write_end(self, key: str) -> None:
        self.unwritten.append({"end": key})

    def flush(self) -> None:
        """Write the records that were added since the last call."""
        if self.unwritten:
            assert self._file is not None
            text, self.unwritten = _encode(self.unwritten).encode(), []
            line = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
            while line:
                line = line[self._file.write(line) :]

    def _load(self, path: Path) -> None:
        for record in read_records(path):
            if "turn" in record:
                self._turns[record["turn"]] = record["tokens"]
            elif "answer" in record:
                self.answers[record["answer"]] = _entry(record)
            else:
                self.ends.add(record["end"])

    def _prune(self, step: int) -> None:
        """Remove the steps before the newest checkpoint, which no resume can need."""
        if self._rank:
            return
        saved = [int(match[1]) for path in self.directory.parent.glob("*") if (match := _CHECKPOINT.match(path.name))]
        newest = max((at for at in saved if at < step), default=None)
        for at, _, path in _files(self.directory):
            if newest is not None and at < newest:
                with contextlib.suppress(OSError):
                    path.unlink()


def _files(directory: Path) -> list[tuple[int, int, Path]]:
    """Step, number of the run, and path of each file."""
    paths = list(directory.iterdir()) if directory.is_dir() else []
    return [(int(match[1]), int(match[2]), path) for path in paths if (match := _FILE.fullmatch(path.name))]


def _files_of(directory: Path, step: int) -> list[tuple[int, Path]]:
    return sorted((life, path) for at, life, path in _files(directory) if at == step)


def refuse_other_answer(known: JournalEntry, found: JournalEntry, where: str) -> None:
    """Stop the run if a deterministic environment gives another answer than before.

    Raises:
        RolloutError: the answers differ; with both.
    """
    before, now = _comparable(known), _comparable(found)
    if before != now:
        shown = [end_cut(json.dumps(value, ensure_ascii=False, default=str), SHOWN) for value in (before, now)]
        raise RolloutError(
            f"environment: {where} answers {shown[1]}, and before the run was interrupted it answered {shown[0]}. Its "
            "recovery is deterministic, and its state cannot be brought back. Fix it, or set recovery = 'restart'."
        )


def _comparable(entry: JournalEntry) -> Any:
    value = entry.value
    if isinstance(value, StepResult):
        calls = [(call.name, call.outcome, call.error) for call in value.calls]
        return [plain(value.observation), float(value.reward), value.terminated, value.truncated, calls]
    return plain(value)


def plain(observation: Observation) -> Any:
    """An observation in JSON values."""
    if observation is None or isinstance(observation, str):
        return observation
    return [dict(message) for message in observation]


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, up to the first incomplete line."""
    with open(path, "rb") as file:
        for line in file:
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
                return
            yield from json.loads(text)


def _entry(record: Mapping[str, Any]) -> JournalEntry:
    value: Any = record.get("reset")
    if "step" in record:
        observation, reward, terminated, truncated, calls = record["step"]
        value = StepResult(observation, reward, terminated, truncated, calls=tuple(CallRecord(*x) for x in calls))
    return JournalEntry(CallRecord(*record["record"]), value)
