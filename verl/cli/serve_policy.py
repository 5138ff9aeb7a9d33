"""`verl serve-policy`: a saved policy behind an OpenAI-compatible endpoint that keeps the exact sampled tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.cli.console import CONFIG_DIR, echo
from verl.cli.generate import OVERRIDES, PATH, faults_reported, located, running
from verl.errors import ConfigError
from verl.utils.directories import TemporaryDirectory
from verl.utils.signals import termination_signals

if TYPE_CHECKING:
    from verl.compose.load_policy import SavedPolicy

DEFAULT_ROW_TOKENS = 4096


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
        # serve_forever cannot be stopped from a handler of its own thread
        ends = (signal.SIGINT, *termination_signals())
        before = [
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start())
            for number in ends
        ]
        try:
            server.serve_forever(poll_interval=0.1)
        finally:
            for number, handler in zip(ends, before, strict=True):
                signal.signal(number, handler)
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
