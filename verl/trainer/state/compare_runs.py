"""Comparison of two runs: what they were started with, the metrics of each step, and their last checkpoints.

origin        settings, code, data and environment, by path       every value that differs
steps         every metric but times, in order of steps           the first that differs
checkpoints   every logical tensor, then the plain state          the first that differs, with its first element
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.read.lazy_tensors import as_tensor
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.resolve import RunCheckpoints
from verl.errors import CheckpointNotFound, ConfigError, end_cut
from verl.tracking.jsonl import json_lines
from verl.trainer.state.lineage import ENVIRONMENT, events_of, is_content
from verl.trainer.state.training_identity import differences
from verl.utils.external_input import ExternalInputError, read_record

TIMES = (
    "time_s",
    "perf/samples_per_s",
    "sync/copy_s",
    "sync/load_s",
    "sync/proof_s",
    "async/wait_s",
    "async/oldest_group_s",
    "async/rollout_idle_s",
    "perf/peak_memory_mib",
    *(f"{role}/peak_gpu_memory_mib" for role in ("actor", "critic", "sft", "preference")),
    "timing/",
    "episode/call_s",
    "episode/call_max_s",
    "episode/seconds_max",
    "episode/journal_",  # of the run that resumes alone
)  # metrics with these prefixes differ in every run and are ignored
IN_NAMES_OF_TIMES = (  # so do metrics with these in their names: requests to a server, and where old rows are kept
    *("remote_requests", "remote_retries", "remote_latency_"),
    *("replay/rows_warm", "replay/rows_cold", "replay/memory_mib"),
)
STATES = ("dataloader/state.json", "scheduler/state.json", "rng/python.json", "rng/numpy.json")
OF_TIME = ("async_rewards",)  # in `scheduler/state.json`: how much there is of it depends on speed
OF_ONE_LAYOUT = ("rng",)  # generators: roles in the driver's process draw from its own, roles elsewhere have theirs


@dataclass(frozen=True)
class Tolerance:
    """Tolerance of a comparison of two values.

    Args:
        tolerance: 0 is bit by bit; else the largest difference relative to the larger number, and for a tensor
            relative to its largest element.
    """

    tolerance: float = 0.0

    def numbers(self, a: Any, b: Any) -> bool:
        """Whether two plain values are the same, or two numbers near enough."""
        if type(a) is not type(b) or not isinstance(a, (int, float)) or isinstance(a, bool):
            return type(a) is type(b) and a == b
        both_nan = math.isnan(a) and math.isnan(b)
        return a == b or both_nan or (self.tolerance > 0 and abs(a - b) <= self.tolerance * max(1.0, abs(a), abs(b)))

    def elements(self, a: Tensor, b: Tensor) -> Tensor:
        """Mask of the elements in which two tensors of one shape differ."""
        if not self.tolerance:
            return _bits(a) != _bits(b)
        x, y = a.double(), b.double()
        return ~((x - y).abs() <= self.tolerance * torch.maximum(x.abs(), y.abs()).amax())


@dataclass
class RunOrigin:
    """Settings, code, data and environment that a run was started with, from the files in its directory.

    Attributes:
        settings: `config.yaml`, with references unresolved.
        code: version and commit of verl, and whether files differ from that commit; None if not recorded.
        data: digests of data, models and tokenizer by path; None without checkpoints, since they are not recorded then.
        environment: packages, threads and device; None if not recorded.
    """

    settings: dict[str, Any]
    code: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None


@dataclass
class RunComparison:
    """Differences between two runs.

    Attributes:
        differing: path -> values of both, by section of `RunOrigin`; a section that a run does not have is missing.
        metrics: the first step and metric that differ, or the number of steps; None where there is no difference.
    """

    differing: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    metrics: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether nothing that both runs recorded differs."""
        return self.metrics is None and not any(self.differing.values())


def compare_runs(a: Path, b: Path) -> RunComparison:
    """Compare settings, code, data, environment and metrics of two runs, also of running and killed ones.

    Raises:
        ConfigError: one of them is not the directory of a run, or its files cannot be read.
    """
    comparison, origins = RunComparison(), [vars(origin_of(run_dir)) for run_dir in (a, b)]
    for section in origins[0]:
        first, second = (origin[section] for origin in origins)
        if first is not None and second is not None:
            comparison.differing[section] = differences(first, second)
    first, second = steps_of(a), steps_of(b)
    last = [max(steps, default=0) for steps in (first, second)]
    common = {step: metrics for step, metrics in second.items() if step <= min(last)}
    comparison.metrics = first_step_apart(first, common, Tolerance())
    if comparison.metrics is None and last[0] != last[1]:
        comparison.metrics = f"the last step is {last[0]} in the first run and {last[1]} in the second"
    return comparison


def origin_of(run_dir: Path) -> RunOrigin:
    """Read what a run was started with.

    Raises:
        ConfigError: this is not the directory of a run, or a file cannot be parsed.
    """
    if not (run_dir / "config.yaml").is_file() or not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{run_dir} is not the directory of a run: it needs config.yaml and metrics.jsonl.")
    try:
        settings, environment = read_record(run_dir / "config.yaml"), read_record(run_dir / ENVIRONMENT)
    except ExternalInputError as error:
        raise ConfigError(str(error)) from error
    for file, content in (("config.yaml", settings), (ENVIRONMENT, {} if environment is None else environment)):
        if not isinstance(content, dict):
            raise ConfigError(f"{run_dir / file} holds {_described(content)} and no mapping.")
    origin = RunOrigin(settings, environment=environment)
    origin.code = None if environment is None else environment.pop("code", None)
    try:
        saved = RunCheckpoints.of(run_dir)
    except CheckpointNotFound:
        saved = None
    started = [event for event in (events_of(saved, run_dir) if saved else []) if event["event"] == "run"]
    if started:
        identity = started[-1].get("identity") or {}
        origin.data = {path: value for path, value in identity.items() if is_content(value) or path == "tokenizer"}
        origin.code = origin.code or started[-1].get("code")
    return origin


def steps_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step that `metrics.jsonl` holds, evaluations among them, times left out.

    Half a line, which a killed run leaves, is passed over.

    Raises:
        ConfigError: a line holds no metrics.
    """
    steps: dict[int, dict[str, float]] = {}
    for record in json_lines(run_dir / "metrics.jsonl"):
        try:
            numbers = {key: float(x) for key, x in record.items() if key != "step" and not is_of_time(key)}
            steps.setdefault(int(record["step"]), {}).update(numbers)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{run_dir}/metrics.jsonl has a line without metrics: {_described(record)}") from error
    return steps


def is_of_time(key: str) -> bool:
    """Whether a metric differs in every run: of seconds, of requests to a server, or of where rows are kept."""
    return key.startswith(TIMES) or any(part in key for part in IN_NAMES_OF_TIMES)


def first_step_apart(
    a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]], near: Tolerance
) -> str | None:
    """The first metric in which two runs differ, in the steps that `b` made; None where there is none."""
    for step in sorted(b):
        keys = dict.fromkeys([*a.get(step, {}), *b[step]])
        for key in keys:
            x, y = a.get(step, {}).get(key), b[step].get(key)
            if x is None or y is None or not near.numbers(x, y):
                return f"step {step}: {key} is {_described(x)} in the first run and {_described(y)} in the second"
    return None


def first_part_apart(a: Checkpoint, b: Checkpoint, near: Tolerance) -> str | None:
    """The first tensor or plain value in which two checkpoints differ, every byte verified; None where there is none.

    With a tolerance, the random generators are left out: another layout of processes draws otherwise.
    """
    first, second = CheckpointReader(a), CheckpointReader(b)
    return next(itertools.chain(_tensors_apart(first, second, near), _states_apart(first, second, near)), None)


def num_compared(checkpoint: Checkpoint, near: Tolerance) -> int:
    """Number of tensors of a checkpoint that are compared."""
    return sum(not _left_out(tensor.component, near) for tensor in checkpoint.manifest.tensors)


def _tensors_apart(first: CheckpointReader, second: CheckpointReader, near: Tolerance) -> Iterator[str]:
    named = [{t.full_name: t for t in reader.checkpoint.manifest.tensors} for reader in (first, second)]
    for name in named[0] | named[1]:
        a, b = (tensors.get(name) for tensors in named)
        if _left_out(name.partition("/")[0], near):
            continue
        if a is None or b is None:
            yield f"tensor {name} is in the {'second' if a is None else 'first'} run's checkpoint alone"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            shapes = f"{a.dtype} {list(a.shape)} in the first run and {b.dtype} {list(b.shape)}"
            yield f"tensor {name} is {shapes} in the second"
        else:
            x, y = (as_tensor(r.tensor(t.component, t.name), t) for r, t in ((first, a), (second, b)))
            if (difference := _difference(x, y, near)) is not None:
                yield f"tensor {name}: {difference}"


def _difference(x: Tensor, y: Tensor, near: Tolerance) -> str | None:
    apart = near.elements(x, y)
    if not bool(apart.any()):
        return None
    index = torch.nonzero(apart)[0].tolist()
    most = float((x.double() - y.double()).abs().max())
    values = f"{x[tuple(index)].item()!r} in the first run and {y[tuple(index)].item()!r} in the second"
    return f"{int(apart.sum())} of {x.numel()} elements differ, the first is {index}: {values}; at most by {most:.3g}"


def _states_apart(first: CheckpointReader, second: CheckpointReader, near: Tolerance) -> Iterator[str]:
    ranks = [_rank_files(reader) for reader in (first, second)]
    if ranks[0] != ranks[1] and not _left_out("rng", near):
        yield f"rng holds {len(ranks[0])} ranks' generators in the first run and {len(ranks[1])} in the second"
        return
    for file in (*STATES, *ranks[0]):
        if not _left_out(file.partition("/")[0], near):
            yield from _values_apart(_json(first, file), _json(second, file), near, file)


def _rank_files(reader: CheckpointReader) -> list[str]:
    return [entry.path for entry in reader.files("rng") if entry.path.startswith("rng/rank_")]


def _values_apart(a: Any, b: Any, near: Tolerance, where: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        for key in a:
            yield from _values_apart(a[key], b[key], near, f"{where}: {key}" if ": " not in where else f"{where}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _values_apart(x, y, near, f"{where}[{index}]")
    elif not near.numbers(a, b):
        yield f"{where} is {_described(a)} in the first run and {_described(b)} in the second"


def _json(reader: CheckpointReader, file: str) -> Any:
    content = json.loads(bytes(reader.read(file)))
    return {key: x for key, x in content.items() if key not in OF_TIME} if isinstance(content, dict) else content


def _left_out(component: str, near: Tolerance) -> bool:
    return near.tolerance > 0 and component in OF_ONE_LAYOUT


def _bits(x: Tensor) -> Tensor:
    """The bytes of each element, so that nan equals itself and 0.0 is not -0.0; [..., item size] for wide types."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x if x.dtype == torch.bool else x.contiguous().view(whole)


def _described(value: Any) -> str:
    return "absent" if value is None else end_cut(repr(value), 60)
