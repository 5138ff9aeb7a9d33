"""`verl eval` and `verl generate`: evaluates a saved policy or samples from it. Nothing is trained or written.
`verl serve-policy`: a saved policy behind an OpenAI-compatible endpoint that keeps the exact sampled tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.cli.console import CONFIG_DIR, echo, faults_reported, print_table
from verl.errors import ConfigError
from verl.storage.config import is_address
from verl.tracking.base import short
from verl.utils.directories import TemporaryDirectory
from verl.utils.signals import orderly_termination

if TYPE_CHECKING:
    from verl.compose.load_policy import SavedPolicy

log = logging.getLogger(__name__)

PATH = typer.Argument(
    help="A checkpoint, a directory of them, a run, a Hugging Face directory, latest, or an address such as s3://..."
)
OVERRIDES = typer.Argument(help="Overrides of its configuration, such as reward=math or rollout.top_p=0.9.")
DATA = typer.Option(exists=True, dir_okay=False, help="A parquet or JSONL file that replaces the run's data.")
DEFAULT_ROW_TOKENS = 4096


def evaluate(
    path: Annotated[str, PATH],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    data: Annotated[Path | None, DATA] = None,
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object instead of a table.")] = False,
) -> None:
    """Evaluate a saved policy on the evaluation data of its run, with the reward and sampling options of the run.

    Step, sampling noise and rows are those of the run, so the metrics equal those that it logged at that step.
    """
    from verl.compose.load_policy import has_own_rows, root_of

    with faults_reported(), located(path) as saved, running(saved, root_of(saved), overrides or [], data) as trainer:
        if trainer.eval_data is None:
            raise ConfigError("the run has no evaluation data. Give --data FILE, or data.eval_files=[...].")
        if data is not None and saved.point is not None:
            _tell_overlap(saved, overrides or [], trainer)
        if data is None and not has_own_rows(saved) and not any(text.startswith("data") for text in overrides or []):
            log.warning("%s names no rows to answer: these are the sums of data=arithmetic. Give --data FILE.", path)
        metrics, rows = trainer.evaluate(saved.step), len(trainer.eval_data)
    if as_json:
        origin = path if is_address(path) else str(saved.origin)
        source = {"actor": origin, "step": saved.step, "rows": rows}
        echo(json.dumps({**source, "metrics": metrics}, indent=2))
        return
    echo(f"{f'{path}, step {saved.step}' if is_address(path) else saved.description}, on {rows} rows")
    print_table(["metric", "value"], [[key, short(value)] for key, value in metrics.items()])


def generate(
    path: Annotated[str, PATH],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="A text to continue. Repeatable.")] = None,
    data: Annotated[Path | None, DATA] = None,
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each --prompt is a user message.")] = False,
    samples: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="Greedy decoding.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens of a response.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line: prompt, response, tokens.")] = False,
) -> None:
    """Print responses of a saved policy to prompts, to the rows of a file, or to the evaluation data of its run."""
    if prompt and data is not None:
        raise typer.BadParameter("give --prompt or --data, not both", param_hint="--prompt")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    settings = [f"rollout.{key}={value}" for key, value in options.items() if value is not None]
    with faults_reported(), TemporaryDirectory("verl-prompts-") as directory, located(path) as saved:
        if prompt:
            data = Path(directory) / "prompts.jsonl"
            asked = [[{"role": "user", "content": text}] if chat else text for text in prompt]
            data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
            settings.append("data.prompt_key=prompt")
        from verl.compose.load_policy import trained_on_texts

        unrated = ["reward=length"]  # a cheap reward: responses are not scored
        with running(saved, "ppo", [*unrated, *(overrides or []), *settings], data) as trainer:
            rows = _responses(trainer, samples, greedy)
            has_template = getattr(trainer.tokenizer, "chat_template", None) and not trained_on_texts(saved)
            if prompt and not chat and has_template:
                log.warning(
                    "Prompts were sent as plain texts, and the model has a chat template: add --chat to use it."
                )
    for row in rows:
        echo(json.dumps(row) if as_json else f"{row['prompt']}\n  -> {row['response']}")


def _tell_overlap(saved: SavedPolicy, overrides: Sequence[str], trainer: Any) -> None:
    """Warn of rows that the policy was trained on, by the data of its own run, and of rows that repeat others."""
    from verl.compose.load_policy import policy_run, root_of
    from verl.data.base import DataSplits, data_counts, duplicates_sentence

    is_of_file = re.compile(r"data(=|\.(?!_target_=))")  # a class of data that is named is that of the run
    of_run = [text for text in overrides if is_of_file.match(text) is None]
    counts = data_counts(DataSplits(train=trainer.eval_data))
    counts = {name.replace("train", "eval"): number for name, number in counts.items()}
    try:
        trained = policy_run(saved, root_of(saved), of_run).data.build(trainer.context).train
        counts["eval_rows_in_train"] = data_counts(DataSplits(trained, trainer.eval_data)).get("eval_rows_in_train", 0)
    except (ConfigError, OSError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        log.warning("Data: whether these rows were trained on is unknown: the data of the run is not read (%s)", reason)
    if (sentence := duplicates_sentence(counts)) is not None:
        log.warning("%s", sentence)


def _responses(trainer: Any, samples: int, greedy: bool) -> list[dict[str, Any]]:
    from verl.ops.sampling import EVALUATION
    from verl.rollout.base import GenerationRequest

    if trainer.eval_data is None:
        raise ConfigError("the run has no evaluation data. Give --prompt TEXT or --data FILE.")
    batch = trainer.eval_data.collate(range(len(trainer.eval_data)))
    rows = trainer.generate(batch, GenerationRequest(0, num_samples=samples, greedy=greedy, stream=EVALUATION))
    lengths = rows["response_mask"].sum(dim=1).tolist()
    texts = zip(rows["prompt_text"], rows["response_text"], lengths, strict=True)
    return [{"prompt": prompt, "response": response, "tokens": tokens} for prompt, response, tokens in texts]


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
    from verl.compose.load_policy import policy_run

    run = changed(policy_run(saved, root, overrides, None if data is None else data.absolute()))
    own_reward = root == "ppo" and not any(text.startswith("reward") for text in overrides)
    with (
        TemporaryDirectory("verl-policy-") as directory,
        run.build(BuildContext(run_dir=Path(directory))) as trainer,
    ):
        if own_reward and saved.point is not None:
            with saved.point.understanding("scheduler/state.json"):
                state = saved.point.read_json("scheduler/state.json")
                trainer.reward.load_state_dict(state.get("reward", {}))
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
        bool,
        typer.Option("--ignore-sampling", help="Use those of the run, whatever a request says."),
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
    Policies of the built-in data, whose prompts are texts, are served with --text; others with their chat template.
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
            with contextlib.suppress(KeyboardInterrupt), orderly_termination():
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
        if run.environment is None:
            return run
        return dataclasses.replace(
            run, environment=None, trainer=dataclasses.replace(run.trainer, eval_without_tools=False)
        )

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
    """Make a server for a trainer's policy. It listens, but does not serve yet.

    Args:
        trainer: its policy is served.
        host, port: address to listen at.
        record: file for token ids and log-probs of every request.
        max_tokens: the most tokens of a conversation; None for the context length.
        kv_cache_gib: memory for keys and values of open conversations.
        ignore_sampling: ignore sampling options of requests that differ from those of the run.
        timeout_s: limit of one turn.
        environment: that of the training, or None.
        joins_texts: join messages as one text, without the chat template.
    Raises:
        ConfigError: the engine does not support turns, or the address is not available.
    """
    from verl.rollout.base import TurnLimits, stop_tokens
    from verl.serving.endpoint import PolicyEndpoint
    from verl.serving.http_api import PolicyServer

    rollout, tokenizer = trainer.description.rollout, trainer.tokenizer
    if "turns" not in rollout.supports:
        raise ConfigError(
            f"rollout is {type(rollout).__name__}: it does not support conversations of several turns. Set rollout=hf."
        )
    actor = trainer.actor_worker
    held = trainer.description.actor.model.max_positions()
    if max_tokens is not None and held is not None and max_tokens > held:
        raise ConfigError(f"--max-tokens is {max_tokens}: more than the context length {held} of the model.")
    engine_holds = actor.sampler.engine.row_tokens
    if max_tokens is not None and engine_holds is not None and max_tokens > engine_holds:
        raise ConfigError(
            f"--max-tokens is {max_tokens}: more than the {engine_holds} of the engine. Add "
            f"rollout.max_model_len={max_tokens} under rollout=vllm, or lower it."
        )
    row_tokens = max_tokens or min(held or DEFAULT_ROW_TOKENS, engine_holds or held or DEFAULT_ROW_TOKENS)
    stops = stop_tokens(actor.model, tokenizer, rollout.stop_token_ids).tolist()
    limits = TurnLimits(row_tokens, kv_cache_gib)
    template = getattr(trainer.description.data, "chat_template", None)
    endpoint = PolicyEndpoint(
        lambda: actor.sampler.engine.turns(limits),
        tokenizer, template, stops, rollout.max_new_tokens, row_tokens, record,
        getattr(environment, "tool_format", "auto"), environment, joins_texts,
    )  # fmt: skip
    if endpoint.format_fault is not None:
        logging.getLogger(__name__).warning("Requests with tools are refused: %s", endpoint.format_fault)
    sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p}
    try:
        return PolicyServer(endpoint, host, port, "policy", sampling, ignore_sampling, timeout_s)
    except OSError as error:
        endpoint.close()
        raise ConfigError(f"--port is {port}: cannot listen at {host}:{port} ({error}). Choose another.") from error
