"""A cache on disk of what trials have found of models, by a digest of all that it depends on."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.model_paths.paths import ModelPaths, PathFinding
from verl.utils.external_input import read_text

LIBRARIES = ("torch", "transformers", "numpy")
IGNORED = ("_name_or_path", "dtype", "transformers_version", "use_cache", "architectures")


def kept(model: Any, key: tuple, examine: Callable[[], PathFinding]) -> PathFinding:
    """The cached finding of a key; examined and cached if there is none."""
    file = cache_dir() / f"{digest(model, key)}.json"
    if (finding := _read(file)) is None:
        finding = examine()
        if not finding.distances:  # nothing was tried, for a reason that may pass
            return finding
        _write(file, finding, model, key)
    return finding


def cache_dir() -> Path:
    """`$VERL_CACHE/model_paths`, or the same below `~/.cache/verl`."""
    return Path(os.environ.get("VERL_CACHE") or Path.home() / ".cache/verl").expanduser() / "model_paths"


def digest(model: Any, key: tuple) -> str:
    """Digest of the configuration, the source of the model's classes, library versions and verl's own code."""
    from verl.model_paths.twin import model_class

    config = model.config
    parts = {
        "config": {name: x for name, x in config.to_dict().items() if name not in IGNORED},
        "attention": str(config._attn_implementation),
        "class": model_class(model).__qualname__,
        "key": key,
        "versions": library_versions(),
    }
    found = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    for source in (*_sources(model_class(model)), _own_code()):
        found.update(source)
    return found.hexdigest()[:32]


@functools.lru_cache
def _sources(kind: type) -> tuple[bytes, ...]:
    """The files in which a model's classes are written, without those of torch."""
    files = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins", "typing", "abc"):
            try:
                files.add(inspect.getfile(base))
            except (TypeError, OSError):
                files.add(base.__qualname__)
    return tuple(Path(file).read_bytes() if Path(file).is_file() else file.encode() for file in sorted(files))


@functools.lru_cache
def _own_code() -> bytes:
    import verl.ops.packing

    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(str(verl.ops.packing.__file__))]
    return b"".join(file.read_bytes() for file in files) + sys.version.encode()


def _read(file: Path) -> PathFinding | None:
    try:
        return finding_in(json.loads(read_text(file)))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or invalid: checked again


def finding_in(cached: Mapping[str, Any]) -> PathFinding:
    """Parse a file of the cache.

    Raises:
        KeyError, TypeError: it is another kind of file.
    """
    paths = ModelPaths(**{**cached["paths"], "reasons": tuple(cached["paths"]["reasons"])})
    return PathFinding(paths, cached["refusal"], cached["distances"])


def library_versions() -> list[str]:
    """Installed versions of `LIBRARIES`."""
    return [importlib.metadata.version(name) for name in LIBRARIES]


def _write(file: Path, finding: PathFinding, model: Any, key: tuple) -> None:
    """Leave it for the next run, whole or not at all; a disk that refuses costs the next run seconds."""
    from verl.model_paths.twin import model_class
    from verl.models.call import has_lm_head

    about = {"model": model_class(model).__name__, "family": model.config.model_type, "draws": has_lm_head(model)}
    cached = {**about, "key": key, "versions": library_versions(), **asdict(finding)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        with os.fdopen(handle, "w") as out:
            json.dump(cached, out)
        os.replace(name, file)
    except OSError:
        return
