"""A model's Hugging Face state dict in memory: tensors by their names in files, and the accompanying small files."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.models.heads import PEFT, SCORE, head_of
from verl.models.images import images_of
from verl.models.own_module import OwnModule
from verl.models.pretrained import quiet_transformers
from verl.utils.directories import TemporaryDirectory

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_BIN = "adapter_model.bin"  # for tools that read only this format


@dataclass(frozen=True)
class HFStateDict:
    """Content of a directory as `save_pretrained` would write it.

    Attributes:
        tensors: the live weights by their names in the file, sorted; tied ones once. Sorting makes files independent of
            the parameter order of the model.
        file: name of the weight file; None for `model.safetensors` and its shards.
        files: content of small files by name.
    """

    tensors: Mapping[str, Tensor]
    file: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def live_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors that `hf_state_dict` uses, by their names in the model; tied ones are one object under two names."""
    tensors = model.state_dict(keep_vars=True)
    head = head_of(model)
    if not hasattr(head.backbone, "peft_config"):
        return tensors
    backbone, of_head = head.split(tensors)
    return {**head.joined({name: x for name, x in backbone.items() if "lora_" in name}), **of_head}


def hf_state_dict(model: Any, tensors: Mapping[str, Tensor] | None = None) -> HFStateDict:
    """State dict of a Hugging Face model, of a model with a peft adapter (the adapter only), or of a `ModelHead`, whose
    head is in a separate file or part of the weight file.

    Args:
        model: the model.
        tensors: `live_tensors` unsharded, for a sharded model.
    """
    tensors = live_tensors(model) if tensors is None else tensors
    saved = saved_tensors(model, tensors)
    return HFStateDict({name: saved[name] for name in sorted(saved)}, saved_file(model), small_files(model, tensors))


def saved_file(model: Any) -> str | None:
    """Name of the weight file; None for `model.safetensors` and its shards."""
    return ADAPTER_FILE if hasattr(head_of(model).backbone, "peft_config") else None


def saved_tensors(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of `live_tensors` to their names in the files; those of a custom head are left out."""
    head = head_of(model)
    core = head.backbone
    of_core, of_head = head.split(tensors)
    if hasattr(core, "peft_config"):
        from peft import get_peft_model_state_dict

        backbone = {name: x.detach() for name, x in get_peft_model_state_dict(core, state_dict=of_core).items()}
    else:
        backbone = _weights(core, of_core)
    return head.in_weight_file(backbone, {name: x.detach() for name, x in of_head.items()})


def names_in_files(model: Any) -> dict[str, str] | None:
    """Name in the files -> name in `live_tensors`; None for a model that transformers converts when it is saved."""
    live, numbers, places = live_tensors(model), list[str](), dict[int, int]()
    for name, x in live.items():
        if id(x) not in places:
            places[id(x)] = len(numbers)
            numbers.append(name)
    standing_in = [torch.tensor(number) for number in range(len(numbers))]  # tied tensors are one object
    try:
        saved = saved_tensors(model, {name: standing_in[places[id(x)]] for name, x in live.items()})
    except (RuntimeError, ValueError, IndexError):  # conversion splits or joins tensors
        return None
    if any(x.ndim or x.dtype != torch.int64 for x in saved.values()):
        return None
    names = {name: numbers[int(x)] for name, x in saved.items()}
    return names if len(set(names.values())) == len(names) else None


def small_files(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Small files that accompany the weights: the configuration, and a custom head from `tensors`."""
    head = head_of(model)
    core = head.backbone
    with TemporaryDirectory() as directory, quiet_transformers():
        if hasattr(core, "peft_config"):
            core.peft_config[core.active_adapter].save_pretrained(directory)
            files = {name: _in_order(data) for name, data in files_in(Path(directory)).items()}
        else:
            core.save_pretrained(directory, state_dict={})  # everything except the weights
            files = {name: x for name, x in files_in(Path(directory)).items() if not name.endswith(".safetensors")}
    return {**files, **head.files(head.split(tensors)[1])}


def as_torch_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialise tensors by `torch.save`."""
    file = io.BytesIO()
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, file)
    return file.getvalue()


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """Content of the files that `tokenizer.save_pretrained` writes, and of those of the model's image processor."""
    images = images_of(tokenizer)
    with TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        return files_in(Path(directory)) | ({} if images is None else images.files)


def load_adapter(model: Any, file: Path) -> None:
    """Load the weights of a peft adapter from a file into a model with that adapter, which may be the backbone of the
    classification model that it is saved for.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    weights = torch.load(file, map_location="cpu", weights_only=True) if file.suffix == ".bin" else load_file(file)
    base = model.get_base_model()
    if not hasattr(base, base.base_model_prefix):
        below = f"{PEFT}{base.base_model_prefix}."
        weights = {n.replace(below, PEFT, 1): x for n, x in weights.items() if n != PEFT + SCORE}
    with torch.no_grad():
        report = set_peft_model_state_dict(model, weights)
    assert not report.unexpected_keys, report.unexpected_keys


def files_in(directory: Path) -> dict[str, bytes]:
    """Content of the files of a directory, by name, sorted."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _in_order(adapter_config: bytes) -> bytes:
    """Sort the layer names of an adapter configuration; peft writes a set, in random order."""
    config = json.loads(adapter_config)
    if isinstance(names := config["target_modules"], list):
        config["target_modules"] = sorted(names)
    return json.dumps(config, indent=2, sort_keys=True).encode()


def _weights(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict with the names of `save_pretrained`: tied weights once, and conversions of loading reversed."""
    if isinstance(model, OwnModule):
        return model.saved(tensors)
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = {name: tensor.detach() for name, tensor in tensors.items()}
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return dict(revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model)))
