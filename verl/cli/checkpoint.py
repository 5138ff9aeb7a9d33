"""`verl checkpoint`: list, inspect, verify, export, push and pull checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.manifest import MANIFEST
from verl.checkpoint.describe import CheckpointSummary, age_s, components, status_of, summaries, summary_of
from verl.checkpoint.export import atomic_directory, require_unused
from verl.checkpoint.export import export as export_component
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.discovery import LATEST
from verl.checkpoint.read.reader import Level
from verl.checkpoint.remote.commit_log import CommitLog
from verl.checkpoint.remote.transfer import find_at, upload
from verl.checkpoint.remote.transfer import pull as pull_one
from verl.checkpoint.resolve import directories_below, resolve_path
from verl.cli.console import FOUND, counted, duration, echo, parse_duration, print_json, size
from verl.errors import BadCheckpoint, CheckpointNotFound, ConfigError
from verl.storage.config import is_address, storage_at
from verl.tracking.base import headline
from verl.tracking.console import print_table
from verl.utils.directories import TemporaryDirectory

ADDRESS = "Checkpoints in object storage, such as s3://BUCKET/PREFIX, or one of them. Credentials: the environment."


def remote_summaries(address: str, level: Level = "quick") -> list[CheckpointSummary]:
    """Checkpoints in object storage, in order of publication, including those that fail verification.

    Raises:
        CheckpointNotFound: there are none.
        StorageError: the store does not answer.
    """
    tier, named = find_at(address)
    records, seen, listed = tier.records() if named is None else [named], set[tuple[str, int]](), []
    for record in records:
        try:
            found = tier.verified(record, level)
        except BadCheckpoint as error:
            directory, status = tier.directory(record), status_of(error)
            listed.append(CheckpointSummary(directory=directory, status=status, faults=error.faults))
            continue
        contents = {(entry.blake3, entry.size) for entry in found.manifest.files}
        described = {"checkpoint": found, "state": tier.state(found), "is_newest": record == records[-1]}
        added = sum(size for _, size in contents - seen)
        listed.append(CheckpointSummary(directory=found.directory, status="complete", added_bytes=added, **described))
        seen |= contents
    return listed


ADAPTER_CONFIG = "adapter_config.json"
app = typer.Typer(name="checkpoint", no_args_is_help=True, help="Inspect, verify and export checkpoints.")
PATH = "A checkpoint, a directory of checkpoints, its `latest`, or the directory of a run."
MOST_METRICS = 3  # of several dozen
Path_ = Annotated[str, typer.Argument(metavar="PATH", help=PATH)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.command("pull")
def pull(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help=ADDRESS)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for checkpoints; created if missing.")],
    all_: Annotated[bool, typer.Option("--all", help="All checkpoints, not just the newest.")] = False,
) -> None:
    """Download a checkpoint from object storage; every byte is verified by hash."""
    tier, named = find_at(address)
    records = tier.records() if all_ and named is None else [named or tier.newest().record]
    for record in records:
        checkpoint = pull_one(tier, record, CheckpointStore(directory))
        echo(f"{checkpoint.directory}: step {checkpoint.step}, {size(checkpoint.num_bytes)}")


@app.command("push")
def push(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a directory of them.")],
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help=ADDRESS)],
    all_: Annotated[bool, typer.Option("--all", help="All complete checkpoints, not only the newest.")] = False,
) -> None:
    """Upload a checkpoint; files that the store has are not sent again. It is safe while a trainer uploads."""
    if not is_address(address):
        raise ConfigError(f"ADDRESS is {address!r}: expected one such as s3://BUCKET/PREFIX.")
    manager = CheckpointManager(path)
    chosen = [summary.checkpoint for summary in manager.list()] if all_ else [manager.checkpoint]
    if not chosen:
        raise CheckpointNotFound(f"{path} holds no complete checkpoint")
    with storage_at(address.rstrip("/")).connect() as store:
        log = CommitLog(store)
        for checkpoint in chosen:
            _, sent_bytes = upload(log, checkpoint)
            echo(f"{checkpoint.name} is in {store.address}: {size(sent_bytes)} sent")


@app.command("ls")
def list_checkpoints(path: Path_ = ".", json: Json = False) -> None:
    """List checkpoints in order of publication; (*) marks the one that a run would resume from."""
    try:
        listings = {path: _summaries(path)}
    except CheckpointNotFound:
        parent = Path(path).expanduser().absolute()
        below = directories_below(parent) if not is_address(path) and parent.is_dir() else []
        if not (listings := {f"{directory}": summaries(CheckpointStore(directory)) for directory in below}):
            raise
    if json:
        print_json([summary.to_json() for listed in listings.values() for summary in listed])
        return
    for directory, listed in listings.items():
        if directory != path:
            echo(f"{directory}:")
        if not listed:
            echo(f"{directory} holds no checkpoint yet")
            continue
        print_table(
            ["", "checkpoint", "step", "epoch", "saved", "size", "adds", "metrics", "state"],
            [_row(summary) for summary in listed],
            right=["step", "epoch", "size", "adds"],
            cut=["saved", "metrics", "state"],
        )


@app.command("inspect")
def inspect(
    path: Path_,
    component: Annotated[str | None, typer.Option(help="Only the tensors of this part.")] = None,
) -> None:
    """Print as JSON what a checkpoint holds: sizes by component, tensors, and what the trainer recorded."""
    if not (listed := _summaries(path, one=True)):
        raise CheckpointNotFound(f"{path} holds no checkpoint")
    summary = next((candidate for candidate in reversed(listed) if candidate.status == "complete"), listed[-1])
    report = summary.to_json()
    if summary.checkpoint is not None:
        tensors = [
            {"component": t.component, "name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.num_bytes}
            for t in summary.checkpoint.manifest.tensors
            if component in (None, t.component)
        ]
        parts = [dataclasses.asdict(part) for part in components(summary.checkpoint)]
        report |= {"components": parts, "tensors": tensors, "trainer_state": summary.state}
    print_json(report)
    raise typer.Exit(0 if summary.status == "complete" else FOUND)


@app.command("verify")
def verify(
    path: Path_,
    full: Annotated[bool, typer.Option("--full", help="Hash every byte; names the file and the tensor.")] = False,
    json: Json = False,
) -> None:
    """Verify checkpoints; the exit status is 1 if one is damaged, or if there is none."""
    level: Level = "full" if full else "quick"
    verified = _summaries(path, level)
    if json:
        print_json([summary.to_json() for summary in verified])
    elif not verified:
        echo(f"{path} holds no checkpoint")
    else:
        for summary in verified:
            found = summary.checkpoint
            holds = f" ({counted(len(found.manifest.contents), 'file')}, {_size(summary)})" if found else ""
            echo(f"{summary.name}: {summary.status}{holds}")
            for fault in summary.faults:
                echo(f"  {fault}")
        echo("every byte was hashed" if full else "sizes and headers were checked; --full hashes every byte")
    raise typer.Exit(0 if verified and all(summary.status == "complete" for summary in verified) else FOUND)


@app.command("health")
def health(
    path: Annotated[str, typer.Argument(metavar="DIR", help=PATH)],
    max_age: Annotated[
        str | None, typer.Option("--max-age", metavar="TIME", help="The newest must not be older: 90s, 30m, 2h, 1d.")
    ] = None,
) -> None:
    """Readiness probe, on one line: is there a complete checkpoint to resume from?

    The exit status is 0 if there is one, 1 if there is none or it is too old, 2 if it cannot be determined.
    """
    limit_s = None if max_age is None else parse_duration(max_age, "--max-age")
    where, found = resolve_path(path), _summaries(path)
    for summary in found:
        if summary.status == "too new":
            _not_ready(f"{summary.name} was saved by a later version of verl")
    names = ", ".join(summary.name for summary in found if summary.status != "complete")
    whole = (summary.checkpoint for summary in found if summary.status == "complete")
    if not (meant := [checkpoint for checkpoint in whole if checkpoint is not None and where.covers(checkpoint)]):
        _not_ready(f"no complete checkpoint in {path}" + (f" (bad: {names})" if names else ""))
    newest = meant[-1]
    age = age_s(newest)
    saved = f"{newest.name}, step {newest.step}, saved {duration(age)} ago"
    if limit_s is not None and age > limit_s:
        _not_ready(f"{saved}, which is more than {duration(limit_s)}")
    echo(f"ready: {saved}" + (f"; passed over {names}, see verl checkpoint verify" if names else ""))


def _not_ready(reason: str) -> NoReturn:
    echo(f"not ready: {reason}")
    raise typer.Exit(FOUND)


def _summaries(path: str, level: Level = "quick", one: bool = False) -> list[CheckpointSummary]:
    """The checkpoints at a path or an address; with `one` the newest of a directory."""
    if is_address(path):
        return remote_summaries(path, level)
    where = resolve_path(path)
    store, name = CheckpointStore(where.directory), where.name or (LATEST if one else None)
    if name is None:
        return summaries(store, level=level)
    if name == LATEST:
        return summaries(store, where.open().name, level)
    return summaries(store, name, level) or [summary_of(store.disk, where.directory / name, level)]


def _row(summary: CheckpointSummary) -> list[object]:
    checkpoint = summary.checkpoint
    mark = "*" if summary.is_newest else ""
    state = f"{summary.status}; {summary.faults[0]}" if summary.faults else summary.status
    if checkpoint is None:
        return [mark, summary.name, "", "", "", "", "", "", state]
    manifest = checkpoint.manifest
    metrics = " ".join(f"{name}={value:.4g}" for name, value in headline(manifest.metrics, MOST_METRICS).items())
    sizes = [_size(summary), size(summary.added_bytes)]
    return [mark, summary.name, manifest.step, summary.state.get("epoch"), manifest.saved_at, *sizes, metrics, state]


def _size(summary: CheckpointSummary) -> str:
    return size(summary.checkpoint.num_bytes) if summary.checkpoint else ""


ExportType = Literal["float32", "bfloat16", "float16"]


@app.command("export")
def export(
    path: Path_,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that does not exist yet.")],
    component: Annotated[str, typer.Option(help="Which model.")] = "actor",
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge a LoRA adapter into its base model, and write the whole model.")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="REPO", help="Upload it to the Hugging Face hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: the repository is not private.")] = False,
    dtype: Annotated[
        ExportType | None, typer.Option(help="Of the weights, instead of that of the checkpoint or base model.")
    ] = None,
) -> None:
    """Export a model of a checkpoint as a Hugging Face directory; every byte is verified by hash.

    PATH may also be a model that is in no checkpoint: a GGUF file, the final `actor/` of a run, or with --merge a LoRA
    adapter.
    """
    from verl.cli.hub import create_repository, upload
    from verl.models.gguf import is_gguf
    from verl.models.pretrained import VALUE_HEAD_FILE

    absolute = require_unused(FileSystem(), out)
    own = ADAPTER_CONFIG if merge else "config.json"
    is_plain = is_gguf(path) or (
        (Path(path) / own).is_file() and not (Path(path).absolute().parent / MANIFEST).exists()
    )
    manager = None if is_plain else CheckpointManager(path)
    name = path if manager is None else f"{component} of {manager.name}"
    repository = None if push is None else create_repository(push, public)  # refused before the work
    if manager is None:
        _write_model(path, name, absolute, dtype)
    elif merge or dtype is not None:
        with TemporaryDirectory("verl-export-") as directory:
            exported = Path(directory) / component
            export_component(manager, exported, component)
            if merge and not (exported / ADAPTER_CONFIG).is_file():
                raise ConfigError(f"--merge: {name} is a whole model. Leave --merge out.")
            if not merge and any((exported / file).is_file() for file in (ADAPTER_CONFIG, VALUE_HEAD_FILE)):
                raise ConfigError(f"--dtype: {name} is an adapter, or has a value head. Leave --dtype out.")
            _write_model(str(exported), name, absolute, dtype)
    else:
        names = export_component(manager, out, component)
        echo(f"{name} is in {out}: {counted(len(names), 'file')}, {_stored(absolute)}")
    if repository is not None:
        echo(f"{out} is on the hub: {upload(repository, out)}")


TYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}  # of safetensors


def _stored(directory: Path) -> str:
    """The data types of the weights in a directory, and their size."""
    from safetensors import safe_open

    types: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            kinds = (weights.get_slice(name).get_dtype() for name in weights.keys())  # noqa: SIM118 - no mapping
            types |= {TYPES.get(str(kind), str(kind)) for kind in kinds}
    size_of = sum(file.stat().st_size for file in directory.iterdir() if file.suffix in (".safetensors", ".bin"))
    return f"{' and '.join(sorted(types)) + ', ' if types else ''}{size(size_of)}"


def _write_model(path: str, name: str, out: Path, dtype: str | None) -> None:
    """Write a model of a directory or GGUF file, an adapter merged into its base model, as a Hugging Face directory.

    Args:
        dtype: None for that of the model, of an adapter that of its base model.
    """
    import torch

    from verl.models.images import save_tokenizer
    from verl.models.pretrained import Pretrained, quiet_transformers
    from verl.models.turn_end import save_turn_end

    source = Pretrained(path=path)
    try:
        adapter = source.adapter()
        is_classifier = (adapter or {}).get("task_type") == "SEQ_CLS"
        model = source.load_classifier("cpu") if is_classifier else source.load_causal_lm("cpu")
        stored = source.load_config().dtype if dtype is None else getattr(torch, dtype)
    except (OSError, ConfigError) as error:
        if not (Path(path) / ADAPTER_CONFIG).is_file():
            raise
        raise ConfigError(
            f"the base model of {name} cannot be opened ({str(error).splitlines()[0]}). Put it there, or set "
            f"base_model_name_or_path in {ADAPTER_CONFIG}, of a copy made by export without --merge."
        ) from error
    tokenizer = source.load_tokenizer()
    save_turn_end(model, tokenizer)
    with atomic_directory(FileSystem(), out, f"writing {name} to {out}") as staged, quiet_transformers():
        (model if stored is None else model.to(stored)).save_pretrained(staged)
        save_tokenizer(tokenizer, staged)
    merged = ", merged into its base model," if adapter is not None else ""
    typer.echo(f"{name}{merged} is in {out}: {_stored(out)}")
