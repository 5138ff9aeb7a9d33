"""`verl eval`: how good a saved policy is on the rows of its run, or of a file.

settings ──> responses and rewards of some prompts ──> appended to a file ──> ... ──> metrics with intervals
                                              ^ a killed evaluation continues here
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import verl
from verl.cli.console import CONFIG_DIR, duration, echo, faults_reported, print_table
from verl.cli.generate import DATA, OVERRIDES, PATH, located, running
from verl.component import as_plain
from verl.errors import ConfigError
from verl.storage.config import is_address
from verl.tracking.base import short
from verl.tracking.jsonl import plain
from verl.utils.external_input import ExternalInputError, parse_mapping, read_bytes, write_whole
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
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object instead of a table.")] = False,
) -> None:
    """Evaluate a saved policy on the evaluation data of its run, or on a file, with reward and sampling of the run.

    Weights that come from no run are sampled with their chat template at temperature 1. On the rows of the run, step
    and sampling noise are those of the run, so the metrics equal those that it logged at that step. The same command
    continues an evaluation that was killed.
    """
    from verl.compose.load_policy import root_of
    from verl.monitoring.ppo_metrics import evaluation_estimates

    words = [*(overrides or []), *([] if samples is None else [f"trainer.eval_samples={samples}"])]
    with faults_reported(), located(path) as saved:
        root, origin = root_of(saved, words), path if is_address(path) else str(saved.origin)
        with running(saved, root, words, data) as trainer:
            if trainer.eval_data is None:
                raise ConfigError("the run has no evaluation data. Give --data FILE, or data.eval_files=[...].")
            if data is not None and saved.saved() is not None:
                _tell_overlap(saved, words, trainer, root)
            settings = {"policy": origin, "step": saved.step, **_settings(trainer.description, trainer.eval_data)}
            settings["identity"] = _identity(trainer.description, str(saved.actor), origin)
            if not as_json:
                print_table(["setting", "value"], [[key, str(value)] for key, value in settings.items()])
            file, total = RESULTS / f"{settings['identity']}.jsonl", len(trainer.eval_data)
            records = _records(trainer, saved.step, total if data is None else BATCH_ROWS, file, settings)
    metrics = trainer.evaluation_metrics(records)
    estimates = evaluation_estimates(records) if root == "ppo" else {}
    metrics = {key: mean for key, (mean, _, _) in estimates.items()} | metrics
    intervals = {key: ends for key, (_, *ends) in estimates.items()}
    if as_json:
        found = {"actor": origin, "step": saved.step, "rows": total, "metrics": metrics}
        echo(json.dumps({**found, "intervals": intervals, "settings": settings, "results": str(file)}, indent=2))
        return
    echo(f"{origin}, step {saved.step}, on {total} rows; every response is in {file}")
    shown = {key: "{} to {}".format(*map(short, ends)) for key, ends in intervals.items()}
    print_table(["metric", "value", "95% interval"], [[k, short(v), shown.get(k, "")] for k, v in metrics.items()])


def _records(trainer: Any, step: int, size: int, path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records of all rows, batch by batch, each batch appended to a file; an evaluation of the same settings that has
    not ended is continued. The last record of a batch has the number of rows that are done."""
    lines, total = [*_whole_lines(path)], len(trainer.eval_data)
    done = [number for number, line in enumerate(lines, 1) if "rows_done" in line]
    records = lines[1 : done[-1]] if done and lines[0] == settings else []
    if records and records[-1]["rows_done"] >= total:  # it has ended
        records = []
    if first := records[-1]["rows_done"] if records else 0:
        echo(f"{first} of {total} rows were evaluated before, in {path}", err=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _as_lines([settings, *records]))
    started = time.monotonic()
    for start in range(first, total, size):
        rows = range(start, min(start + size, total))
        found = trainer.evaluation_records(rows, step)
        found[-1]["rows_done"] = rows.stop
        records += found
        with open(path, "ab") as file:
            file.write(_as_lines(found))
        if left := (time.monotonic() - started) / (rows.stop - first) * (total - rows.stop):
            key, value = next(iter(trainer.evaluation_metrics(records).items()))
            echo(f"{rows.stop} of {total} rows  {key} {short(value)}  about {duration(left)} left", err=True)
    return records


def _as_lines(records: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(plain(redact_tree(record))) + "\n" for record in records).encode()


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, up to the first line that is not whole."""
    with contextlib.suppress(ExternalInputError):
        for line in read_bytes(path).splitlines() if path.is_file() else ():
            yield parse_mapping(line)


def _settings(run: Any, rows: Any) -> dict[str, Any]:
    """The settings by which an evaluation can be judged and repeated."""
    data = ", ".join(getattr(run.data, "eval_files", ())) or type(run.data).__name__
    settings = {"data": data, "dtype": run.actor.model.dtype, "seed": run.trainer.seed}
    if not hasattr(run, "rollout"):
        return settings
    return settings | {
        "reward": f"{type(run.reward).__name__}, right from {run.trainer.success_score:g}",
        "prompts": "by a chat template" if getattr(rows, "has_chats", False) else "texts, without a chat template",
        "temperature": run.rollout.temperature,
        "max_new_tokens": run.rollout.max_new_tokens,
        "samples": f"1 greedy, {run.trainer.eval_samples} drawn",
    }


def _identity(run: Any, actor: str, origin: str) -> str:
    """A hash of all that results depend on: settings, size and time of the files that they name, and the version."""
    text = json.dumps(plain(as_plain(run)))
    named = {Path(name) for value in re.findall(r'"([^"\\]+)"(?!:)', text) if (name := value.partition(":")[0])}
    files = [file for path in named for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()]
    stamps = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    kept = [stamp for stamp in stamps if not is_address(origin) or not stamp[0].startswith(actor)]
    text = json.dumps([text, kept, verl.__version__]).replace(actor, origin)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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
