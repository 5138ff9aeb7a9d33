"""`verl serve-training`: training as a service, in the protocol of Tinker's SDK.

overrides of the group actor -> base model -> TrainingService -> HTTP on this machine
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from verl.cli.console import echo, faults_reported
from verl.errors import ConfigError, install_command

KEY = "VERL_SERVICE_KEY"  # environment variable: what clients must give as TINKER_API_KEY
SAMPLERS = ("HFRollout", "AutoRollout", "VLLMRollout")
PLANNED_RANK = 32  # the default of the SDK


def serve_training(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="actor=OPTION, actor.model.path=DIR, rollout=OPTION, trainer.*.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; others than this machine's need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free port.")] = 8000,
    directory: Annotated[Path, typer.Option("--dir", help="Directory of saved weights.")] = Path("training_service"),
    name: Annotated[list[str] | None, typer.Option(help="Name of the model for clients, besides its path.")] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Sample each prompt by itself: slower, with the same bits every time.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print the memory that it would need, and end.")] = False,
) -> None:
    """Train adapters for clients of Tinker's SDK, until Ctrl-C.

    TINKER_BASE_URL=http://HOST:PORT TINKER_API_KEY=tml-KEY is all that a client needs. Adapters of all clients share
    one base model. With the environment variable VERL_SERVICE_KEY=tml-KEY clients must give this key.
    """
    with faults_reported():
        words = [word for word in overrides or [] if not word.startswith(("port=", "host="))]
        given = dict(word.split("=", 1) for word in overrides or [] if word not in words)
        host = given.get("host", host)
        try:
            port = int(given.get("port", port))
        except ValueError:
            raise ConfigError(f"port is {given['port']!r}: expected a number.") from None
        if not 0 <= port <= 65535:
            raise ConfigError(f"port is {port}: expected 0 to 65535.")
        if missing := [x for x in ("tinker", "fastapi", "uvicorn") if importlib.util.find_spec(x) is None]:
            hint = f"Run: {install_command('tinker')}, or use TrainingSession in Python."
            raise ConfigError(f"serve-training needs what is not installed: {', '.join(missing)}. {hint}")
        from verl.compose.from_yaml import compose_over_default
        from verl.compose.validate import validate

        composed = compose_over_default({}, ["tracker=none", "checkpoint=off", "algorithm=grpo", *words])
        run = validate(composed.config, composed.faults)
        if type(run.rollout).__name__ not in SAMPLERS:
            raise ConfigError(f"rollout is {type(run.rollout).__name__}: the service samples with hf, vllm or auto.")
        if plan:
            for line in _plan_lines(run):
                echo(line)
            return
        _serve(run, host, port, directory, name or [], exact)


def _plan_lines(run: Any) -> Iterator[str]:
    """Memory with one adapter in training, a full micro-batch and the samples of a batch, and of further adapters."""
    from verl.compose.warm_start import with_architectures
    from verl.models.lora import LoRA
    from verl.service.jobs import MAX_SAMPLES
    from verl.trainer.plan.memory import memory_plan
    from verl.trainer.plan.workload import GIB, device_here

    rows = dataclasses.replace(run.trainer, prompts_per_step=MAX_SAMPLES // 2, group_size=2)
    actor = dataclasses.replace(run.actor, lora=LoRA(rank=PLANNED_RANK, alpha=float(PLANNED_RANK)))
    planned = with_architectures(dataclasses.replace(run, trainer=rows, actor=actor))
    memory = memory_plan(planned, device_here(run.trainer.device))
    (role,) = memory.roles
    yield from memory.lines()
    yield "it fits" if memory.fits else f"it does not fit: {memory.peak.name}"
    each = role.optimizer * 3 // 2 + role.gradients  # the moments are two copies of its weights
    yield f"{each / GIB:.3g} GiB for each further adapter of rank {PLANNED_RANK} in training"


def _serve(run: Any, host: str, port: int, directory: Path, names: list[str], exact: bool) -> None:
    import rich
    import uvicorn

    from verl.component import BuildContext
    from verl.compose.validate import refuse_here
    from verl.compose.warm_start import resolve_warm_starts
    from verl.service.adapters import BaseModel
    from verl.service.http_api import application, is_this_machine
    from verl.service.service import TrainingService
    from verl.trainer.setup import ProcessState, prepare_context
    from verl.utils.directories import TemporaryDirectory
    from verl.utils.memory import computes_bfloat16
    from verl.utils.threads import choose_threads

    key = os.environ.get(KEY) or None
    if key is None and not is_this_machine(host):
        raise ConfigError(f"--host is {host}: another machine could train here. Set {KEY}=tml-KEY, or leave it out.")
    if not (key or "tml-").startswith("tml-"):
        raise ConfigError(f"{KEY} does not begin with tml-: clients refuse such a key. Choose another.")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # from now on a second service is refused the port
    except OSError as error:
        raise ConfigError(f"--port is {port}: cannot listen at {host}:{port} ({error}). Choose another.") from error
    refuse_here(run)
    run = resolve_warm_starts(run, rich.get_console())
    with TemporaryDirectory("verl-service-") as temporary:
        context = prepare_context(BuildContext(run_dir=Path(temporary)), run.trainer)
        state = ProcessState(run.trainer)
        try:
            actor = run.actor.on_device(computes_bfloat16(context.device))
            base = BaseModel(
                actor.model, context.device, actor.decided_autocast, actor.micro_batch_tokens, actor.packing,
                run.rollout, context,
            )  # fmt: skip
            if run.trainer.num_threads == "auto" and context.device == "cpu":
                width = int(base.core.config.get_text_config().hidden_size)
                echo(choose_threads(width, actor.decided_autocast, None) or "")
            path = str(getattr(actor.model, "path", type(actor.model).__name__))
            service = TrainingService(base, [*names, path], directory.absolute(), run.trainer.seed, joins=not exact)
            options: Any = {"log_level": "warning", "timeout_graceful_shutdown": 5}  # clients hold requests open longer
            server = uvicorn.Server(uvicorn.Config(application(service, key), host, port, **options))
            with contextlib.suppress(KeyboardInterrupt):
                url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
                echo(f"{service.names[0]} at {url}, saved weights in {directory}")
                server.run(sockets=[listener])
        finally:
            state.restore()
