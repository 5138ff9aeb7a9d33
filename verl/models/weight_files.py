"""The safetensors files of a Hugging Face directory, read in slices, and models without weights to put them in."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.resharding.layout import Box

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """Named weights in a directory. Nothing is read before it is asked for.

    Args:
        directory: made by `save_pretrained`.
        prefix: that a model and its backbone differ in, such as `model`.
    """

    def __init__(self, directory: Path, prefix: str = ""):
        self.prefix = f"{prefix}." if prefix else ""
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        if (directory / INDEX).is_file():
            index = json.loads((directory / INDEX).read_text())["weight_map"]
            self._files = {name: directory / file for name, file in index.items()}
        elif (directory / SINGLE).is_file():
            self._files = dict.fromkeys(self._reader(directory / SINGLE).keys(), directory / SINGLE)

    def name_of(self, wanted: str) -> str | None:
        """The name in the files of a model's tensor, or None if it is not there."""
        tried = (wanted, self.prefix + wanted, wanted.removeprefix(self.prefix))
        return next((name for name in tried if name in self._files), None)

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether all of these are there, in their shapes."""
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


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Models made within have their parameters on the meta device; buffers, which no file holds, are real."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(include_buffers=False):
        yield
