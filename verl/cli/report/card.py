"""The model card of an exported model, from the records of its checkpoint and run, and the upload to the hub."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoint.manager import CheckpointManager
from verl.cli.report.read import read_run
from verl.compose.validate import TARGET
from verl.errors import ConfigError, StorageRefused, StorageUnreachable
from verl.trainer.state.lineage import read_events
from verl.utils.redact import redact, redact_tree

DESCRIBED_GROUPS = ("algorithm", "loss", "data", "environment", "reward", "reference")  # of a configuration
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def model_card(manager: CheckpointManager, component: str = "actor", is_adapter: bool = False) -> str:
    """The card of a component of a checkpoint, without secrets and without the directories of absolute paths.

    Settings that differ from the defaults are listed if the directory of its run is still there.
    """
    from huggingface_hub import ModelCardData

    state, events = redact_tree(manager.state), read_events(manager.directory.parent)
    starts = {event["run_id"]: event.get("run_dir") for event in events if event["event"] == "run"}
    run_dir = Path(starts.get(manager.checkpoint.manifest.run_id) or "no run")
    differences = redact_tree(read_run(run_dir).differences) if (run_dir / "config.yaml").is_file() else {}
    base, dataset = _at(state, "identity", "actor.model.path"), _at(state, "config", "data", "dataset")
    header = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation" if component == "actor" else None,
        base_model=base if isinstance(base, str) and _HUB_NAME.fullmatch(base) else None,
        datasets=[dataset] if isinstance(dataset, str) and _HUB_NAME.fullmatch(dataset) else None,
        tags=["verl", "reinforcement-learning"],
    )
    facts = {"base model": _at(state, "config", component, "model"), "content of the base model": base}
    facts |= {part: _at(state, "config", part) for part in DESCRIBED_GROUPS}
    facts |= {"code": state.get("code"), "run": state.get("run_id"), "resumed from": _at(state, "lineage", "parent")}
    return (
        f"---\n{header.to_yaml()}\n---\n\n# {_at(state, 'config', 'trainer', 'experiment_name') or component}\n\n"
        f"The {component} after {manager.step} steps of training with verl.\n"
        + _table("Training", facts)
        + _table("Last evaluation", {key: value for key, value in manager.metrics.items() if key.startswith("eval/")})
        + _table("Settings that differ from the defaults", {key: values[0] for key, values in differences.items()})
    )


def _at(tree: Any, *keys: str) -> Any:
    """A value of a record, or None; records of others may have any form."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _table(title: str, rows: Mapping[str, Any]) -> str:
    described = {key: redact(_described(value)) for key, value in rows.items() if value is not None}
    lines = [f"| {key} | {' '.join(value.replace('|', '&#124;').split())} |\n" for key, value in described.items()]
    return f"\n## {title}\n\n| | |\n|---|---|\n{''.join(lines)}" if lines else ""


def _described(value: Any) -> str:
    """A component as `Name(field=value, ...)`; of absolute paths, which name machines and people, the last part."""
    if isinstance(value, Mapping):
        fields = (f"{key}={_described(item)}" for key, item in value.items() if key != TARGET and item is not None)
        return f"{str(value.get(TARGET, '')).rpartition('.')[2]}({', '.join(fields)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, str) and value.startswith(("/", "~")):
        value = f".../{Path(value).name}"
    return value if isinstance(value, str) else json.dumps(value)


def create_repository(name: str, public: bool = False) -> str:
    """Create a model repository of the Hugging Face hub if there is none, and return its name with the owner.

    Raises:
        ConfigError: the repository exists and is public, and `public` is false.
        StorageRefused: the token is missing, wrong, or may not write there.
        StorageUnreachable: the hub does not answer, or the name is invalid.
    """
    with _hub(name) as api:
        repository = api.create_repo(name, private=not public, exist_ok=True).repo_id
        is_allowed = public or api.model_info(repository).private
    if not is_allowed:
        raise ConfigError(f"--push is {name!r}: this repository is public. Add --public, or name another one.")
    return repository


def upload(repository: str, directory: Path) -> str:
    """Upload the files of a directory as one commit, and return its address. Raises: see `create_repository`."""
    hint = f" The export in {directory} is complete; to try again: hf upload {repository} {directory}"
    with _hub(repository, hint) as api:
        return api.upload_folder(repo_id=repository, folder_path=directory).commit_url


@contextlib.contextmanager
def _hub(name: str, hint: str = "") -> Iterator[Any]:
    """The client of the hub; its errors are raised as ours."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        yield api
    except Exception as error:  # of the transport of the client too, which differs between versions
        where, said = f"--push is {name!r}: {api.endpoint}", str(error).strip().splitlines()[-1:]
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            todo = f"Set HF_TOKEN to a token that may write to {name}, or use hf auth login."
            raise StorageRefused(f"{where} refuses: {''.join(said)} {todo}{hint}") from error
        raise StorageUnreachable(f"{where} fails: {type(error).__name__} {''.join(said)}.{hint}") from error
