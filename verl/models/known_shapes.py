"""Shapes of common models on the hub, shipped with the package, so that sizes are computed without a network.

`known_shapes.json` has for each shape its number of parameters, those entries of config.json that sizes depend on, and
the context length of every model on the hub that has this shape. No model is loaded by these entries.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.models.pretrained import ModelSource, Pretrained, is_local

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONNECT_S = 5.0  # timeout of the request that shows whether the hub can be reached


@functools.cache
def known_shapes() -> dict[str, dict[str, Any]]:
    """Entries of config.json by hub name."""
    entries = json.loads(files("verl.models").joinpath("known_shapes.json").read_text(encoding="utf-8"))
    return {
        name: {**entry["config"], "max_position_embeddings": length}
        for entry in entries
        for name, length in entry["max_position_embeddings"].items()
    }


def sizes_config(source: ModelSource) -> PretrainedConfig:
    """The configuration of a model for computing its size: from a local directory or the cache of the hub, else from
    the shipped shapes, else from the hub.

    Raises:
        ConfigError: it is none of them and the hub cannot be reached, which is found within `CONNECT_S` seconds.
    """
    if not isinstance(source, Pretrained):
        return source.load_config()
    if has_shipped_shapes(source):
        from transformers import AutoConfig

        entries = dict(known_shapes()[source.base_path()])
        return AutoConfig.for_model(entries.pop("model_type"), **entries)
    if not _is_here(source):
        _require_hub(source)
    return source.load_config()


def has_shipped_shapes(source: ModelSource) -> bool:
    """Whether `sizes_config` takes the shipped shapes: not for a revision, nor where config.json is on this machine."""
    if not isinstance(source, Pretrained) or source.revision is not None:
        return False
    return source.base_path() in known_shapes() and not _is_here(source)


def _is_here(source: Pretrained) -> bool:
    """Whether config.json is read without a network."""
    from huggingface_hub import try_to_load_from_cache

    path = source.base_path()
    return is_local(path) or isinstance(try_to_load_from_cache(path, "config.json", revision=source.revision), str)


def _require_hub(source: Pretrained) -> None:
    """One request with a short timeout: the hub's client would try again for a minute."""
    from huggingface_hub import constants, get_session

    reason = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=CONNECT_S)
        except Exception as error:  # noqa: BLE001 - a proxy or certificate may fail in many ways
            reason = f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})"
        else:
            return
    raise ConfigError(
        f"path is {source.base_path()!r}: {reason}, its config.json is not in the hub's cache on this machine, and "
        "verl ships no shapes of it. Set path to a directory with its config.json; no weights are needed for a plan."
    )
