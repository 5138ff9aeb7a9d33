"""`verl eval`: how good a saved policy is on the rows of its run, or of a file.

settings ──> responses and rewards of some prompts ──> appended to a file ──> ... ──> metrics with intervals
                                              ^ a killed evaluation continues here
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import verl
from verl.cli.console import CONFIG_DIR, duration, echo, faults_reported, print_table
from verl.cli.generate import DATA, OVERRIDES, PATH, located, running
from verl.component import as_plain
from verl.errors import ConfigError
from verl.monitoring.ppo_metrics import evaluation_estimates
from verl.storage.config import is_address
from verl.tracking.base import short
from verl.tracking.jsonl import plain
from verl.utils.redact import redact_tree

if TYPE_CHECKING:
    from verl.compose.load_policy import SavedPolicy

log = logging.getLogger(__name__)

BATCH_ROWS = 32  # prompts of a file that are answered together
RESULTS = Path("outputs/eval")


def evaluate(
    path: Annotated[str, PATH],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    data: Annotated[Path | None, DATA] = None,
    samples: Annotated[int | None, typer.Option(min=0, help="Responses drawn to each prompt, for pass@k.")] = None,
    text: Annotated[
        bool | None, typer.Option("--text/--chat", help="Text prompts as they are, or as user messages.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for every response; default: below outputs/eval/.")] = None,
    batch_rows: Annotated[int | None, typer.Option(min=1, help="Prompts answered together.")] = None,
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object instead of a table.")] = False,
) -> None:
    """Evaluate a saved policy on the evaluation data of its run, or on a file, with reward and sampling of the run.

    Weights that come from no run are sampled with their chat template at temperature 1. On the rows of the run, step
    and sampling noise are those of the run, so the metrics equal those that it logged at that step. The same command
    continues an evaluation that was killed.
    """
    from verl.compose.load_policy import has_own_rows, root_of

    words = [*(overrides or []), *([] if samples is None else [f"trainer.eval_samples={samples}"])]
    with faults_reported(), located(path) as saved:
        root = root_of(saved, words, data)
        if data is None and not has_own_rows(saved, root) and not any(text.startswith("data") for text in words):
            raise ConfigError(
                f"PATH is {path!r}: it names no rows to answer. Give --data FILE, or data=arithmetic for built-in sums."
            )
        with running(saved, root, words, data, as_chats=None if text is None else not text) as trainer:
            if trainer.eval_data is None:
                raise ConfigError("the run has no evaluation data. Give --data FILE, or data.eval_files=[...].")
            if data is not None and saved.config is not None:
                _tell_overlap(saved, words, trainer, root)
            settings = _settings(path, saved, trainer, root)
            if not as_json:
                print_table(["setting", "value"], [[key, str(value)] for key, value in settings.items()])
            batch_rows = batch_rows or (len(trainer.eval_data) if data is None else BATCH_ROWS)
            identity = _identity(path, saved, trainer)
            file = out or RESULTS / f"{_name(path)}-{identity[:12]}.jsonl"
            with _ResultsFile(file, {**settings, "identity": identity}) as results:
                _answer(trainer, results, saved.step, batch_rows)
                metrics = trainer.evaluation_metrics(results.records)
                estimates = evaluation_estimates(results.records) if root == "ppo" else {}
                results.finish(metrics | {key: mean for key, (mean, _, _) in estimates.items()})
        cut = _share_cut(trainer, results.records) if root == "ppo" else 0.0
    intervals = {key: ends for key, (_, *ends) in estimates.items()}
    metrics |= {key: mean for key, (mean, _, _) in estimates.items() if key not in metrics}
    if cut > 0.1:
        most = settings["max_new_tokens"]
        log.warning("%.0f%% of the responses were cut at rollout.max_new_tokens=%d: set it higher.", 100 * cut, most)
    if as_json:
        source = {"actor": path if is_address(path) else str(saved.origin), "step": saved.step}
        found = {"rows": len(trainer.eval_data), "metrics": metrics, "intervals": intervals}
        echo(json.dumps({**source, **found, "settings": settings, "results": str(file)}, indent=2))
        return
    where = f"{path}, step {saved.step}" if is_address(path) else saved.description
    echo(f"{where}, on {len(trainer.eval_data)} rows; every response is in {file}")
    shown = {key: "{} to {}".format(*map(short, ends)) for key, ends in intervals.items()}
    print_table(["metric", "value", "95% interval"], [[k, short(v), shown.get(k, "")] for k, v in metrics.items()])


def _answer(trainer: Any, results: _ResultsFile, step: int, batch_rows: int) -> None:
    """Evaluate the rows that have no results, batch by batch, with a line of progress after each."""
    total, first, started = len(trainer.eval_data), results.rows, time.monotonic()
    if first:
        echo(f"{first} of {total} rows were evaluated before, in {results.path}", err=True)
    for start in range(first, total, batch_rows):
        rows = range(start, min(start + batch_rows, total))
        results.append(trainer.evaluation_records(rows, step), rows.stop)
        left = (time.monotonic() - started) / (rows.stop - first) * (total - rows.stop)
        if left:
            key, value = next(iter(trainer.evaluation_metrics(results.records).items()))
            so_far = f"{key.removeprefix('eval/')} {short(value)}"
            echo(f"{rows.stop} of {total} rows  {so_far}  about {duration(left)} left", err=True)


class _ResultsFile:
    """Results in JSON lines: the settings, records of each batch with a mark behind them, and at the end the metrics.

    A file of the same settings without an end is continued after its last mark; any other is replaced.

    Attributes:
        records: of all responses so far.
        rows: number of rows that have theirs.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.rows = size = 0
        lines = _whole_lines(path)
        if next(lines, (0, {}))[1] == plain({"kind": "settings", **settings}):
            pending = []
            for end, line in lines:
                if line.get("kind") == "metrics":
                    self.records, self.rows, size = [], 0, 0
                elif line.get("kind") == "rows":
                    self.records, self.rows, size, pending = [*self.records, *pending], line["done"], end, []
                else:
                    pending.append(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "r+b" if size else "wb")  # noqa: SIM115 - closed by __exit__
        self._file.truncate(size)
        self._file.seek(size)
        if not size:
            self._write([{"kind": "settings", **settings}])

    def append(self, records: Sequence[dict[str, Any]], rows: int) -> None:
        """Append the records of a batch; `rows` have theirs then."""
        self._write([*records, {"kind": "rows", "done": rows}])
        self.records += records
        self.rows = rows

    def finish(self, metrics: Mapping[str, float]) -> None:
        self._write([{"kind": "metrics", **metrics}])

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._file.write("".join(json.dumps(plain(redact_tree(line))) + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> _ResultsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _whole_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file, with the position behind each, up to the first line that is not whole."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        while (line := file.readline()).endswith(b"\n"):
            try:
                value = json.loads(line)
            except ValueError:
                return
            if not isinstance(value, dict):
                return
            yield file.tell(), value


def _settings(path: str, saved: SavedPolicy, trainer: Any, root: str) -> dict[str, Any]:
    """The settings by which an evaluation can be judged and repeated."""
    run = trainer.description
    files = getattr(run.data, "eval_files", ())
    settings = {
        "policy": path if is_address(path) else str(saved.origin),
        "data": ", ".join(map(str, files)) or type(run.data).__name__,
        "dtype": run.actor.model.dtype,
        "seed": run.trainer.seed,
    }
    if root != "ppo":
        return settings
    is_chat = "prompt_messages" in getattr(trainer.eval_data, "columns", ())
    template = "that of the data" if getattr(run.data, "chat_template", None) else "that of the model"
    return settings | {
        "reward": f"{type(run.reward).__name__}, right from {run.trainer.success_score:g}",
        "chat template": template if is_chat else "none: prompts are texts",
        "temperature": run.rollout.temperature,
        "max_new_tokens": run.rollout.max_new_tokens,
        "samples": f"1 greedy, {run.trainer.eval_samples} drawn",
    }


def _identity(path: str, saved: SavedPolicy, trainer: Any) -> str:
    """A hash of everything that results depend on: all settings, and size and time of the files that they name."""
    described = as_plain(trainer.description)
    files: dict[str, tuple[int, int]] = {}
    texts = re.findall(r'"((?:[^"\\]|\\.)+)"(?!:)', json.dumps(plain(described)))  # values, without keys
    for found in {Path(name) for text in texts if (name := text.partition(":")[0])}:
        for file in sorted(found.iterdir()) if found.is_dir() else [found]:
            if file.is_file():
                files[str(file)] = (file.stat().st_size, file.stat().st_mtime_ns)
    text = json.dumps([plain(described), {} if is_address(path) else files, saved.step, verl.__version__])
    text = text.replace(str(saved.actor), path) if is_address(path) else text  # it is fetched to another directory
    return hashlib.sha256(text.encode()).hexdigest()


def _name(path: str) -> str:
    parts = [re.sub(r"[^\w.-]", "_", part) for part in path.rstrip("/").split("/") if part not in (".", "..", "actor")]
    return parts[-1][:80] if parts else "policy"


def _share_cut(trainer: Any, records: Sequence[Mapping[str, Any]]) -> float:
    """Share of the responses that are as long as they may be."""
    most = trainer.description.rollout.max_new_tokens
    return sum(row["tokens"] >= most and "turns" not in row for row in records) / len(records)


def _tell_overlap(saved: SavedPolicy, overrides: Sequence[str], trainer: Any, root: str) -> None:
    """Warn of rows that the policy was trained on, by the data of its own run, and of rows that repeat others."""
    from verl.compose.load_policy import has_own_config, policy_run
    from verl.data.base import DataSplits, data_counts, duplicates_sentence

    is_of_file = re.compile(r"data(=|\.(?!_target_=))")  # a class of data that is named is that of the run
    of_run = [text for text in overrides if is_of_file.match(text) is None]
    counts = data_counts(DataSplits(train=trainer.eval_data))
    counts = {name.replace("train", "eval"): number for name, number in counts.items()}
    try:
        if has_own_config(saved, root):
            trained = policy_run(saved, root, of_run).data.build(trainer.context).train
            found = data_counts(DataSplits(trained, trainer.eval_data))
            counts["eval_rows_in_train"] = found.get("eval_rows_in_train", 0)
    except (ConfigError, OSError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        log.warning("Data: whether these rows were trained on is unknown: the data of the run is not read (%s)", reason)
    if (sentence := duplicates_sentence(counts)) is not None:
        log.warning("%s", sentence)
