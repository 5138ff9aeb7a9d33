"""Files in a model's directory: faults of a path and of its files, errors about them, and a reader of weights.

Damaged files, as failed downloads leave them, are found by names, sizes and headers alone.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError, error_text
from verl.ops.resharding.layout import Box
from verl.utils.external_input import (
    ExternalInputError,
    checked_path,
    parse_json,
    parse_mapping,
    printable,
)

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

LFS_POINTER = b"version https://git-lfs.github.com/"
WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
MAPPINGS = ("config.json", "adapter_config.json", "generation_config.json", "tokenizer_config.json", *INDEXES)
JSON = (*MAPPINGS, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json")
NEGATIVE = re.compile(rb'"((num|n)_(\w+_)?(layers?|heads?)|(hidden|intermediate|vocab)_size)"\s*:\s*-\d+')
DOWNLOAD = "Download it again"
CONNECT_S = 5.0  # timeout of the request that shows whether the hub can be reached
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WARM_START = "warm-start://"


def directory_faults(directory: Path, needs_weights: bool = True) -> Iterator[str]:
    """Yield a sentence per file of a model or tokenizer that cannot be read.

    Args:
        needs_weights: whether a directory without weights is a fault.
    """
    faults = [fault for file in sorted(directory.glob("*")) if (fault := file_fault(file)) is not None]
    indexes = [name for name in INDEXES if (directory / name).is_file()]
    if not faults and indexes:
        faults = list(_shard_faults(directory, indexes[0]))
    elif not faults and needs_weights and not any(file for name in WEIGHTS for file in directory.glob(name)):
        faults = [f"{directory} has no weights (*.safetensors, pytorch_model.bin). {DOWNLOAD}."]
    yield from faults


def file_fault(file: Path) -> str | None:
    """Description of the fault of a file; None for a sound one, and for a file of another kind."""
    is_weights = any(file.match(pattern) for pattern in WEIGHTS)
    if file.name not in JSON and file.suffix not in (".model", ".jinja", ".txt") and not is_weights:
        return None
    if file.is_symlink() and not file.exists():
        return f"{file} is a link to a file that does not exist. {DOWNLOAD}."
    if not file.is_file():
        return f"{file} is not a file. {DOWNLOAD}."
    try:
        with file.open("rb") as stream:
            beginning = stream.read(len(LFS_POINTER))
        if beginning == LFS_POINTER:
            return f"{file} is a pointer of git-lfs, not the file itself. Run `git lfs pull` in {file.parent}."
        fault = _safetensors_fault(file) if file.suffix == ".safetensors" else None
        if file.suffix == ".bin" and file.stat().st_size and not beginning.startswith(b"\x80"):
            fault = None if zipfile.is_zipfile(file) else "its end is missing"
        if file.stat().st_size == 0 and (is_weights or file.name in JSON):
            fault = "it is empty"
        elif file.name in JSON:
            fault = _json_fault(file)
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})."
    return None if fault is None else f"{file} is damaged: {fault}. {DOWNLOAD}."


def _json_fault(file: Path) -> str | None:
    try:
        (parse_mapping if file.name in MAPPINGS else parse_json)(data := file.read_bytes())
    except ExternalInputError as error:
        return str(error)
    negative = NEGATIVE.search(data) if file.name == "config.json" else None
    return None if negative is None else f"it says {negative[0].decode()}"


def _safetensors_fault(file: Path) -> str | None:
    """Fault found by the header, by which the library checks the size of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            return None
    except SafetensorError as error:
        return str(error)


def _shard_faults(directory: Path, index: str) -> Iterator[str]:
    weight_map = parse_mapping((directory / index).read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        yield f"{directory / index} is damaged: it lists no weights. {DOWNLOAD}."
        return
    try:
        shards = sorted({checked_path(shard) for shard in weight_map.values()})
    except (ExternalInputError, TypeError) as error:
        yield f"{directory / index} is damaged: {error}. {DOWNLOAD}."
        return
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        yield (f"{directory} lacks {len(missing)} of {len(shards)} files of weights, such as {missing[0]}. {DOWNLOAD}.")


@contextlib.contextmanager
def damage_explained(path: str) -> Iterator[None]:
    """Around reading a model's directory: an error is one about the files, if some of them are damaged or absent."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        faults = list(directory_faults(Path(path))) if Path(path).is_dir() else []
        if faults:
            raise ConfigError([f"path is {path!r}: {fault}" for fault in faults]) from None
        if isinstance(error, OSError):
            reason = (str(error).splitlines() or [repr(error)])[0].rstrip(". ")
            if not is_local(path) and not asks_hub():
                reason = (
                    "it is not in the cache, and the hub is not asked (HF_HUB_OFFLINE) or does not answer. With a "
                    f"network, run: hf download {path}"
                )
            raise ConfigError(f"path is {path!r}: {reason}. Or give a directory made by save_pretrained.") from error
        raise


@lru_cache(maxsize=1)
def asks_hub() -> bool:
    """Whether files are looked for on the hub. One that does not answer is not asked again by this process: each file
    would be tried six times, in 23 s, before that in the cache is used.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and (reason := hub_failure()) is not None:
        log.warning("%s: only what is in the cache is used.", reason)
        constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


def hub_failure() -> str | None:
    """Why the hub cannot be reached, found once within `CONNECT_S` seconds; None if it can."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _no_answer(constants.ENDPOINT)


@lru_cache(maxsize=4)
def _no_answer(endpoint: str) -> str | None:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=CONNECT_S)
    except Exception as error:  # noqa: BLE001 - of the transport, which differs between versions
        return f"{endpoint} cannot be reached ({type(error).__name__})"
    return None


def unloadable_error(path: str, what: str, error: BaseException) -> ConfigError:
    """A file of a model that a library cannot read, such as a value of another type."""
    reason = printable(" ".join(error_text(error).split()))[:500]
    return ConfigError(
        f"path is {path!r}: {what} cannot be loaded ({reason}). Give a directory made by save_pretrained."
    )


def is_local(path: str) -> bool:
    """Whether a path is local: it exists, or does not have the form `name` or `owner/name`."""
    return Path(path).exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1


def in_hub_cache(name: str, revision: str | None = None) -> bool:
    """Whether a hub model was downloaded to this machine before."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)


def path_faults(path: str) -> Iterator[str]:
    """Faults of the setting `path` of a model that can be found before it is loaded."""
    if path.startswith(WARM_START) or not is_local(path):
        return
    directory = Path(path)
    if not directory.is_dir():
        yield f"path is {path!r}: no such directory. Give a directory made by save_pretrained, or a hub name."
    elif not any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
        content = ", ".join(sorted(item.name for item in directory.iterdir())[:5]) or "nothing"
        yield f"path is {path!r}: not a model directory, it has no config.json (found: {content})."
    else:
        yield from (f"path is {path!r}: {fault}" for fault in directory_faults(directory, needs_weights=False))


def read_model_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file is missing or damaged, which `directory_faults` reports.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return parse_mapping(file.read_bytes()) if file.is_file() else None
    except ExternalInputError:
        return None
    except OSError as error:
        raise ConfigError(f"path is {str(file.parent)!r}: {file.name} cannot be used: {error}.") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside this context transformers prints no progress bars, no report of unused weights, no notice of its v6."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class SafetensorsReader:
    """Reads weights by name from a directory, lazily.

    Args:
        directory: written by `save_pretrained`.
        prefix: name prefix by which a model and its backbone differ, such as `model`.
    """

    def __init__(self, directory: Path, prefix: str = ""):
        self.prefix = f"{prefix}." if prefix else ""
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        if (directory / INDEX).is_file():
            try:
                index = parse_mapping((directory / INDEX).read_bytes())["weight_map"]
                self._files = {str(name): directory / checked_path(file) for name, file in index.items()}
            except (LookupError, AttributeError, ExternalInputError) as error:
                raise ConfigError(f"path: {directory / INDEX} lists no files: {error}") from error
        elif (directory / SINGLE).is_file():
            self._files = dict.fromkeys(self._reader(directory / SINGLE).keys(), directory / SINGLE)

    def name_of(self, wanted: str) -> str | None:
        """The name of a model's tensor in the files; None if it is missing."""
        tried = (wanted, self.prefix + wanted, wanted.removeprefix(self.prefix))
        return next((name for name in tried if name in self._files), None)

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the files have all of these tensors, with equal shapes."""
        names = {wanted: self.name_of(wanted) for wanted in tensors}
        return all(name is not None and self._shape(name) == tuple(tensors[w].shape) for w, name in names.items())

    def read(self, wanted: str, box: Box | None = None) -> Tensor:
        """A model's tensor, or a slice of it."""
        name = self.name_of(wanted)
        assert name is not None, wanted
        reader = self._reader(self._files[name])
        if not box:
            return reader.get_tensor(name)
        return reader.get_slice(name)[tuple(slice(start, stop) for start, stop in box)]

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._reader(self._files[name]).get_slice(name).get_shape())

    def _reader(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]
