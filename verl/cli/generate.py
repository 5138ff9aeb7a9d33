"""`verl eval` and `verl generate`: evaluates a saved policy or samples from it. Nothing is trained.
`verl serve-policy`: a saved policy behind an OpenAI-compatible endpoint that keeps the exact sampled tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import verl
from verl.cli.console import CONFIG_DIR, duration, echo, faults_reported
from verl.component import as_plain
from verl.errors import ConfigError
from verl.storage.config import is_address
from verl.tracking.base import short
from verl.tracking.console import print_table
from verl.tracking.jsonl import json_lines
from verl.utils.directories import TemporaryDirectory
from verl.utils.external_input import plain, write_whole
from verl.utils.redact import redact_tree

if TYPE_CHECKING:
    from verl.compose.load_policy import SavedPolicy

log = logging.getLogger(__name__)

PATH = typer.Argument(
    help="A checkpoint, a directory of them, a run, a Hugging Face directory, latest, or an address such as s3://..."
)
OVERRIDES = typer.Argument(help="Overrides of its configuration, such as reward=math or rollout.top_p=0.9.")
DATA = typer.Option(exists=True, dir_okay=False, help="A parquet or JSONL file that replaces the run's data.")
DEFAULT_ROW_TOKENS = 4096
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
    from verl.compose.load_policy import has_own_config, root_of
    from verl.monitoring.ppo_metrics import evaluation_estimates

    words = [*(overrides or []), *([] if samples is None else [f"trainer.eval_samples={samples}"])]
    with faults_reported(), located(path) as saved:
        root, origin = root_of(saved, words), path if is_address(path) else str(saved.origin)
        with running(saved, root, words, data) as trainer:
            if trainer.eval_data is None:
                raise ConfigError("the run has no evaluation data. Give --data FILE, or data.eval_files=[...].")
            if data is not None and has_own_config(saved, root):
                _tell_overlap(saved, words, trainer, root)
            settings = {"policy": origin, "step": saved.step, **_settings(trainer.description, trainer.eval_data)}
            settings["identity"] = _identity(trainer.description)
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
    lines, total = [*json_lines(path)] if path.is_file() else [], len(trainer.eval_data)  # the last may be half written
    done = [number for number, line in enumerate(lines, 1) if "rows_done" in line]
    records = lines[1 : done[-1]] if done and lines[0] == settings else []
    records = [] if records and records[-1]["rows_done"] >= total else records  # it has ended
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


def _identity(run: Any) -> str:
    """A hash of all that results depend on: settings, size and time of the files that they name, and the version."""
    text = json.dumps(plain(as_plain(run)))
    named = [Path(name) for name in set(re.findall(r'"([^"\\:]+)(?:"(?!:)|:)', text))]
    files = [file for path in named for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()]
    stamps = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return hashlib.sha256(json.dumps([text, stamps, verl.__version__]).encode()).hexdigest()[:12]


def _tell_overlap(saved: SavedPolicy, overrides: Sequence[str], trainer: Any, root: str) -> None:
    """Warn of rows that the policy was trained on, by the data of its own run, and of rows that repeat others."""
    from verl.compose.load_policy import policy_run
    from verl.data.base import DataSplits, data_counts, duplicates_sentence

    is_of_file = re.compile(r"data(=|\.(?!_target_=))")  # a class of data that is named is that of the run
    of_run = [text for text in overrides if is_of_file.match(text) is None]
    counts = data_counts(DataSplits(train=trainer.eval_data))
    counts = {name.replace("train", "eval"): number for name, number in counts.items()}
    try:
        trained = policy_run(saved, root, of_run).data.build(trainer.context).train
        counts["eval_rows_in_train"] = data_counts(DataSplits(trained, trainer.eval_data)).get("eval_rows_in_train", 0)
    except (ConfigError, OSError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        log.warning("Data: whether these rows were trained on is unknown: the data of the run is not read (%s)", reason)
    if (sentence := duplicates_sentence(counts)) is not None:
        log.warning("%s", sentence)


def generate(
    path: Annotated[str, PATH],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="A prompt. Repeatable.")] = None,
    data: Annotated[Path | None, DATA] = None,
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="Greedy decoding.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens of a response.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line: prompt, response, tokens.")] = False,
) -> None:
    """Print responses of a saved policy to prompts, to the rows of a file, or to the evaluation data of its run.

    A text is a user message of the model's chat template, if it has one and the policy was not trained on texts;
    data.as_chats=false sends it as it is.
    """
    if prompt and data is not None:
        raise typer.BadParameter("give --prompt or --data, not both", param_hint="--prompt")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    settings = [f"rollout.{key}={value}" for key, value in options.items() if value is not None]
    with faults_reported(), TemporaryDirectory("verl-prompts-") as directory, located(path) as saved:
        if prompt:
            data = Path(directory) / "prompts.jsonl"
            data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompt))
            settings.append("data.prompt_key=prompt")
        unscored = ["reward=length"]  # a cheap reward: responses are not scored
        with running(saved, "ppo", [*unscored, *(overrides or []), *settings], data) as trainer:
            if trainer.eval_data is None:
                raise ConfigError("the run has no evaluation data. Give --prompt TEXT or --data FILE.")
            if prompt and trainer.eval_data.has_chats:
                echo("Prompts are user messages of the chat template; data.as_chats=false sends texts.", err=True)
            for row in _responses(trainer, samples, greedy):
                echo(json.dumps(row) if as_json else f"{row['prompt']}\n  -> {row['response']}")


def _responses(trainer: Any, samples: int, greedy: bool) -> Iterator[dict[str, Any]]:
    from verl.ops.sampling import EVALUATION
    from verl.rollout.base import GenerationRequest

    request, total = GenerationRequest(0, num_samples=samples, greedy=greedy, stream=EVALUATION), len(trainer.eval_data)
    for start in range(0, total, BATCH_ROWS):
        batch = trainer.eval_data.collate(range(start, min(start + BATCH_ROWS, total)))
        rows = trainer.sampling.generate(batch, request)
        lengths = rows["response_mask"].sum(dim=1).tolist()
        texts = zip(rows["prompt_text"], rows["response_text"], lengths, strict=True)
        yield from ({"prompt": prompt, "response": response, "tokens": tokens} for prompt, response, tokens in texts)


@contextmanager
def located(path: str) -> Iterator[SavedPolicy]:
    """The policy at a path; for an address a temporary download."""
    from verl.compose.load_policy import locate_policy

    if not is_address(path):
        yield locate_policy(path)
        return
    from verl.checkpoint.remote.transfer import bring

    with TemporaryDirectory("verl-fetched-") as directory:
        yield locate_policy(str(bring(path, Path(directory))[0].directory))


@contextmanager
def running(
    saved: SavedPolicy,
    root: str,
    overrides: Sequence[str],
    data: Path | None = None,
    changed: Callable[[Any], Any] = lambda run: run,
) -> Iterator[Any]:
    """A trainer for a saved policy that does not train and leaves no files.

    Args:
        changed: makes the run that is built from the one that was composed.
    """
    from verl.component import BuildContext
    from verl.compose.load_policy import has_own_config, policy_run
    from verl.compose.overrides import composition_faults

    if any("_target_" in text for text in overrides):
        sys.path.append(str(Path.cwd()))  # classes that the command names may be in the working directory
    with composition_faults(root):
        run = changed(policy_run(saved, root, overrides, None if data is None else data.absolute()))
    with TemporaryDirectory("verl-policy-") as directory, run.build(BuildContext(run_dir=Path(directory))) as trainer:
        if root == "ppo" and has_own_config(saved, root) and not any(text.startswith("reward") for text in overrides):
            saved.load_reward(trainer.reward)
        yield trainer


def serve_policy(
    path: Annotated[str, PATH],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    host: Annotated[str, typer.Option(help="Address to listen at. There is no authentication.")] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free port.")] = 8000,
    record: Annotated[Path | None, typer.Option(help="File for token ids and log-probs of requests.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Limit of a conversation.")] = None,
    kv_cache_gib: Annotated[float, typer.Option(min=0.0, help="Keys and values of conversations.")] = 2.0,
    ignore_sampling: Annotated[
        bool, typer.Option("--ignore-sampling", help="Use those of the run, whatever a request says.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Limit of one turn in seconds.")] = 600.0,
    text: Annotated[
        bool | None,
        typer.Option("--text/--chat", help="Join messages as one text, as prompts that are texts were in training."),
    ] = None,
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
) -> None:
    """Serve a saved policy to OpenAI clients at http://HOST:PORT/v1, until Ctrl-C.

    Later turns of a conversation continue from the exact tokens that were sampled before. A policy that was trained
    with the tools of an environment is served with their schemas; the client executes the calls.
    Policies that were trained on texts are served with --text; others with their chat template.
    """
    from verl.compose.load_policy import trained_on_texts

    settings = ["reward=length", "data.prompt_key=prompt", *(overrides or [])]  # responses are not scored
    with (
        faults_reported(),
        TemporaryDirectory("verl-prompts-") as directory,
        located(path) as saved,
        served(saved, settings, Path(directory)) as (trainer, environment),
    ):
        server = server_of(
            trainer, host, port, record, max_tokens, kv_cache_gib, ignore_sampling, timeout_s, environment,
            trained_on_texts(saved) if text is None else text,
        )  # fmt: skip
        echo(f"{saved.description} at {server.url}")
        try:
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever(poll_interval=0.1)
        finally:
            server.server_close()
            server.endpoint.close()


@contextlib.contextmanager
def served(saved: SavedPolicy, settings: Sequence[str], directory: Path) -> Iterator[tuple[Any, Any]]:
    """A trainer of the policy alone, and the environment that it was trained with or None.

    Args:
        directory: for a file of prompts that is not used.
    """
    environments = []

    def alone(run: Any) -> Any:
        environments.append(run.environment)
        settings = (
            run.trainer if run.environment is None else dataclasses.replace(run.trainer, eval_without_tools=False)
        )
        return dataclasses.replace(run, environment=None, trainer=settings)

    with running(saved, "ppo", settings, one_prompt(directory), alone) as trainer:
        yield trainer, environments[0]


def one_prompt(directory: Path) -> Path:
    """A file with one prompt, required to compose a run; it is not used."""
    file = directory / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "-"}) + "\n")
    return file


def server_of(
    trainer: Any,
    host: str,
    port: int,
    record: Path | None = None,
    max_tokens: int | None = None,
    kv_cache_gib: float = 2.0,
    ignore_sampling: bool = False,
    timeout_s: float = 600.0,
    environment: Any = None,
    joins_texts: bool = False,
) -> Any:
    """A server for a trainer's policy, which listens and does not serve yet.

    Args:
        environment: that of the training, or None.
        joins_texts: join messages as one text, without the chat template; see `serve_policy` for the others.
    Raises:
        ConfigError: the engine does not support turns, or the address is not available.
    """
    from verl.rollout.base import TurnLimits, stop_tokens
    from verl.serving.endpoint import PolicyEndpoint
    from verl.serving.http_api import PolicyServer

    rollout, tokenizer, actor = trainer.description.rollout, trainer.tokenizer, trainer.actor_worker
    if "turns" not in rollout.supports:
        raise ConfigError(f"rollout is {type(rollout).__name__}: it supports single turns only. Set rollout=hf.")
    held, engine_holds = trainer.description.actor.model.max_positions(), actor.generator.engine.row_tokens
    for most, what in (
        (held, "model holds"),
        (engine_holds, "engine holds (rollout.max_model_len)"),
    ):
        if max_tokens is not None and most is not None and max_tokens > most:
            raise ConfigError(f"--max-tokens is {max_tokens}: more than the {most} that the {what}. Lower it.")
    row_tokens = max_tokens or min(held or DEFAULT_ROW_TOKENS, engine_holds or held or DEFAULT_ROW_TOKENS)
    stops = stop_tokens(actor.model, tokenizer, rollout.stop_token_ids).tolist()
    limits, data = TurnLimits(row_tokens, kv_cache_gib), trainer.description.data
    endpoint = PolicyEndpoint(
        lambda: actor.generator.engine.turns(limits),
        tokenizer, stops, rollout.max_new_tokens, row_tokens, record,
        getattr(environment, "tool_format", "auto"), environment, joins_texts,
        max_pixels=getattr(data, "max_pixels", None),
    )  # fmt: skip
    endpoint.images_fault = next(rollout.faults_with_images(), endpoint.images_fault)
    if endpoint.format_fault is not None:
        logging.getLogger(__name__).warning("Requests with tools are refused: %s", endpoint.format_fault)
    sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p}
    try:
        return PolicyServer(endpoint, host, port, "policy", sampling, ignore_sampling, timeout_s)
    except OSError as error:
        endpoint.close()
        raise ConfigError(f"--port is {port}: cannot listen at {host}:{port} ({error}). Choose another.") from error
