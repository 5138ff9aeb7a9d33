"""Reports of model checks as text and table rows. Imports only the standard library."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.model_paths import finding_cache
from verl.model_paths.paths import ModelPaths, PathFinding
from verl.utils.external_input import read_text

Status = Literal["fast", "plain", "refused"]
Role = Literal["policy", "critic", "reward"]


def status_of(finding: PathFinding, draws: bool = True) -> Status:
    """`fast`: no way that costs much is left out; `plain`: one is; `refused`: the model cannot be trained.

    Args:
        draws: tokens are drawn from it; not from critics and reward models.
    """
    if finding.refusal is not None:
        return "refused"
    is_fast = finding.paths.is_fast if draws else finding.paths.scoring != "equal_lengths"
    return "fast" if is_fast else "plain"


def scoring_of(paths: ModelPaths) -> str:
    """Text for the batching of rows in scoring."""
    words = {"packed": "packed", "padded": "padded", "right_padded": "padded right", "equal_lengths": "equal lengths"}
    return words[paths.scoring] + ", shared prompts" * paths.shares_prompts


def decoding_of(paths: ModelPaths) -> str:
    """Text for the decoding path."""
    words = {"in_place": "in place", "own": "own cache", "none": "no cache"}
    return (
        words[paths.cache]
        + ", shared prefix" * paths.shares_prefix
        + ", equal prompts" * (not paths.pads_prompts)
        + ", own prompts" * (not paths.repeats_rows)
    )


@dataclass(frozen=True)
class CachedFinding:
    """Finding of an earlier run on this machine.

    Attributes:
        family: `model_type` of transformers.
        model: its class.
        crossed: lengths of its configuration that the rows exceeded, in tokens.
        role: what it was tried as.
    """

    family: str
    model: str
    crossed: tuple[int, ...]
    role: Role
    finding: PathFinding

    @property
    def status(self) -> Status:
        return status_of(self.finding, draws=self.role == "policy")


def cached_findings() -> list[CachedFinding]:
    """Those of the cache that hold for the installed libraries, by family; of equal ones the newest."""
    found: dict[tuple[str, str, tuple[int, ...], str], CachedFinding] = {}
    for cached in _kept_files():
        name, crossed = cached["key"]
        role: Role = "reward" if name == "examine_classifier" else "policy" if cached["draws"] else "critic"
        kept = CachedFinding(cached["family"], cached["model"], tuple(crossed), role, finding_cache.finding_in(cached))
        found[kept.family, kept.model, kept.crossed, role] = kept
    return [found[key] for key in sorted(found)]


def _kept_files() -> Iterator[Mapping[str, Any]]:
    """Oldest first; a file that is not ours, or of other versions, is passed over."""
    try:
        versions = finding_cache.library_versions()
    except importlib.metadata.PackageNotFoundError:
        return  # nothing can have been found
    for file in sorted(finding_cache.cache_dir().glob("*.json"), key=_written_at):
        try:
            cached = json.loads(read_text(file))
            name, crossed = cached["key"]
            finding_cache.finding_in(cached)
            if (
                cached["versions"] == versions
                and isinstance(cached["draws"], bool)
                and isinstance(name, str)
                and all(isinstance(n, int) for n in crossed)
            ):
                yield cached
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _written_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
