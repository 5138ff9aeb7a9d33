"""Rows of sample tables and of replay buffers: a run's, or a checkpoint's, also one in object storage."""

from __future__ import annotations

import json
import logging
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.read.discovery import LATEST
from verl.errors import ConfigError
from verl.storage.config import is_address
from verl.tracking.jsonl import lines_of
from verl.utils.external_input import ExternalInputError, open_regular, parse_mapping

_log = logging.getLogger(__name__)

BUFFER = "buffer"
EPISODE = "episode"  # the column with the turns of an episode
OF_BUFFER = ("sample", "policy_version", "advantage")  # further columns besides those of the data


@dataclass(frozen=True)
class DumpedSample:
    """One response.

    Attributes:
        source: `buffer`, or the sample table, such as `eval`.
        length: tokens of the response; None in a sample table, which does not have it.
        others: other columns.
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


def read_samples(run: str | Path) -> list[DumpedSample]:
    """Read all samples of a run, sorted by step.

    Args:
        run: a run directory, a checkpoint with a replay buffer (a directory or an address in object storage), or
            `latest`: the run below `outputs/` or `multirun/` with the newest samples.
    Raises:
        ConfigError: there are no samples.
    """
    if str(run) == LATEST and not Path(run).is_dir():
        run = _last_sampled()
    if is_address(str(run)):
        stored = [sample for name, data in _stored_shards(str(run)) for sample in _of_shard(name, data)]
        if not stored:
            raise ConfigError(f"{run} has no replay buffer. Runs with replay=tiered have one.")
        return sorted(stored, key=lambda sample: sample.step)
    path = Path(run)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory. Give the directory of a run, or a checkpoint.")
    samples = [*read_tables(sorted((path / "samples").glob("step_*.jsonl")))]
    for directory in (path / "replay", path / "replay_buffer", path):
        shards = sorted(file for file in directory.glob("rows_*.arrow") if not file.name.endswith(".index.arrow"))
        samples += [sample for shard in shards for sample in _of_shard(str(shard), _mapped(shard))]
    if not samples:
        raise ConfigError(
            f"{path} has neither samples/step_N.jsonl nor rows of a replay buffer. Runs write samples with each "
            "evaluation, and have a replay buffer with replay=tiered."
        )
    return sorted(samples, key=lambda sample: sample.step)


def _mapped(shard: Path) -> Any:
    import pyarrow as pa

    try:
        with open(open_regular(shard), "rb") as file:
            return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ConfigError(f"{shard} is not a replay shard: {error}") from error


def _last_sampled() -> Path:
    dumps = [path for top in ("outputs", "multirun") for path in Path(top).glob("**/samples/step_*.jsonl")]
    if not dumps:
        raise ConfigError(
            "RUN is 'latest': no run below outputs/ or multirun/ has samples. Give the directory of a run. Runs "
            "write them when they evaluate, which needs held-out rows (data.eval_files) and trainer.sample_rows."
        )
    return max(dumps, key=lambda path: path.stat().st_mtime_ns).parents[1]


def read_tables(files: Iterable[Path]) -> Iterator[DumpedSample]:
    """The rows of sample tables `step_N.jsonl`. What cannot be read, such as the half line that a killed run leaves, is
    left out with a warning."""
    for file in files:
        number = file.stem.removeprefix("step_")
        bad = 0
        for line in filter(bytes.strip, lines_of(file)):
            try:
                row = parse_mapping(line)
                table, score = str(row.pop("table", "samples")), row.pop("score", None)
                texts = [_text(row.pop(name, "")) for name in ("prompt_text", "response_text")]
                score = None if score is None else float(score)
                yield DumpedSample(table, int(number), *texts, score=score, others=row)
            except (ExternalInputError, ValueError, TypeError, OverflowError):
                bad += 1
        if bad:
            _log.warning("%a: %d lines are not samples, and are left out.", str(file), bad)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _stored_shards(address: str) -> Iterator[tuple[str, Any]]:
    """Yield the replay shards of a checkpoint in object storage; nothing else is downloaded."""
    import pyarrow as pa

    from verl.checkpoint.manager import REPLAY_BUFFER, CheckpointManager

    manager = CheckpointManager(address)
    for entry in manager.files(REPLAY_BUFFER):
        if entry.path.endswith(".arrow") and not entry.path.endswith(".index.arrow"):
            yield f"{address}/{entry.path}", pa.py_buffer(manager.read(entry.path))


def _of_shard(name: str, data: Any) -> Iterator[DumpedSample]:
    """The rows of an Arrow file."""
    import pyarrow as pa

    try:
        opened = pa.ipc.open_file(data)
        for number in range(opened.num_record_batches):
            yield from _of_batch(opened.get_batch(number))
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name} is not a complete replay shard: {type(error).__name__}: {error}") from error


def _of_batch(batch: Any) -> Iterator[DumpedSample]:
    import pyarrow.compute as pc

    names = ["step", "score", "prompt_ids", "sample_ids", "policy_version", "advantage", "columns"]
    lengths = pc.list_value_length(  # pyright: ignore[reportAttributeAccessIssue] - made when it is imported
        batch.column("responses")
    ).to_pylist()
    columns = (batch.column(name).to_pylist() for name in names)
    for length, step, score, prompt, sample, version, advantage, others in zip(lengths, *columns, strict=True):
        known = parse_mapping(others)
        texts = _text(known.pop("prompt_text", "")), _text(known.pop("response_text", ""))
        known.pop("score", None)
        columns = {**dict(zip(OF_BUFFER, (sample, version, advantage), strict=True)), **known}
        yield DumpedSample(BUFFER, step, *texts, score=score, length=length, prompt_id=prompt, others=columns)
