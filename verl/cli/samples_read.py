"""Rollouts of a run as plain rows: those of its replay buffer, and the tables of samples that it dumped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.storage.config import is_address

BUFFER = "buffer"


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        source: `buffer`, or the table that it was dumped in, such as `eval`.
        length: tokens of the response; None in a dump, which does not tell.
        others: what else is known of it.
    """

    source: str
    step: int
    prompt: str
    response: str
    score: float | None = None
    length: int | None = None
    prompt_id: int | None = None
    others: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_samples(run: str | Path) -> list[Sample]:
    """All of them, by step.

    Args:
        run: its directory, or a checkpoint with a replay buffer, on the disk or by its address in object storage.
    Raises:
        ConfigError: there is nothing to show.
    """
    if is_address(str(run)):
        found = [sample for name, data in _stored_shards(str(run)) for sample in _of_shard(name, data)]
        if not found:
            raise ConfigError(f"{run} has no rows of a replay buffer. Runs keep them with replay=tiered.")
        return sorted(found, key=lambda sample: sample.step)
    path = Path(run)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory. Give the directory of a run, or a checkpoint.")
    import pyarrow as pa

    found = [*_of_dumps(path / "samples")]
    for directory in (path / "replay", path / "replay_buffer", path):
        shards = sorted(file for file in directory.glob("rows_*.arrow") if not file.name.endswith(".index.arrow"))
        found += [sample for shard in shards for sample in _of_shard(str(shard), pa.memory_map(str(shard)))]
    if not found:
        raise ConfigError(
            f"{path} has neither samples/step_N.jsonl nor rows of a replay buffer. Runs dump samples with each "
            "evaluation, and keep rows with replay=tiered."
        )
    return sorted(found, key=lambda sample: sample.step)


def chosen(samples: Sequence[Sample], tests: Sequence[Callable[[Sample], bool]]) -> list[Sample]:
    """Those that pass every test."""
    return [sample for sample in samples if all(test(sample) for test in tests)]


def within(option: str, text: str, value_of: Callable[[Sample], float | None]) -> Callable[[Sample], bool]:
    """A test from a range such as `0.5:1`, `0.5:`, `:1` or `1`; a row without the value does not pass.

    Raises:
        ConfigError: no range.
    """
    low, colon, high = text.partition(":")
    try:
        least = float(low) if low else float("-inf")
        most = (float(high) if high else float("inf")) if colon else least
    except ValueError:
        raise ConfigError(f"{option} is {text!r}: expected a range such as 0.5:1, 0.5: or :1, or one number.") from None
    return lambda sample: (value := value_of(sample)) is not None and least <= value <= most


def _of_dumps(directory: Path) -> Iterator[Sample]:
    for file in sorted(directory.glob("step_*.jsonl")):
        step = int(file.stem.removeprefix("step_"))
        for line in file.read_text().splitlines():
            row = json.loads(line)
            source, score = row.pop("table", "samples"), row.pop("score", None)
            texts = row.pop("prompt_text", ""), row.pop("response_text", "")
            yield Sample(source, step, *texts, score=None if score is None else float(score), others=row)


def _stored_shards(address: str) -> Iterator[tuple[str, Any]]:
    """The shards of a checkpoint in object storage, of which nothing else is fetched."""
    import pyarrow as pa

    from verl.checkpoint.manager import REPLAY_BUFFER, CheckpointManager

    manager = CheckpointManager(address)
    for entry in manager.files(REPLAY_BUFFER):
        if entry.path.endswith(".arrow") and not entry.path.endswith(".index.arrow"):
            yield f"{address}/{entry.path}", pa.py_buffer(manager.read(entry.path))


def _of_shard(name: str, data: Any) -> Iterator[Sample]:
    """The rows of an Arrow file."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        opened = pa.ipc.open_file(data)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{name} is no whole shard of a replay buffer: {error}") from error
    names = ["step", "score", "prompt_ids", "sample_ids", "policy_version", "advantage", "columns"]
    for number in range(opened.num_record_batches):
        batch = opened.get_batch(number)
        lengths = pc.list_value_length(batch.column("responses")).to_pylist()
        columns = (batch.column(name).to_pylist() for name in names)
        for length, step, score, prompt, sample, version, advantage, others in zip(lengths, *columns, strict=True):
            known = json.loads(others)
            texts = str(known.pop("prompt_text", "")), str(known.pop("response_text", ""))
            known.pop("score", None)
            told = {"sample": sample, "policy_version": version, "advantage": advantage, **known}
            yield Sample(BUFFER, step, *texts, score=score, length=length, prompt_id=prompt, others=told)
