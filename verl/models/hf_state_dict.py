"""A model's Hugging Face state dict in memory: which tensors under which names, and the small files beside them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.models.heads import head_of
from verl.models.own_module import OwnModule
from verl.models.pretrained import quiet_transformers
from verl.utils.temporary_directory import TemporaryDirectory

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_BIN = "adapter_model.bin"  # for tools that need it


@dataclass(frozen=True)
class HFStateDict:
    """What a directory made by `save_pretrained` holds.

    Attributes:
        tensors: the live weights under their names in the file, in order of these; tied ones once. A model that was
            built has its parameters in another order than one that was loaded, and its files must not.
        file: the file that takes them, or None for `model.safetensors` and its shards.
        files: small files by name.
    """

    tensors: Mapping[str, Tensor]
    file: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def live_tensors(model: Any) -> dict[str, Tensor]:
    """What `hf_state_dict` makes its tensors of, by their names in the model; a tied one is the same object twice."""
    tensors = model.state_dict(keep_vars=True)
    head = head_of(model)
    if not hasattr(head.backbone, "peft_config"):
        return tensors
    backbone, own = head.split(tensors)
    return {**head.joined({name: x for name, x in backbone.items() if "lora_" in name}), **own}


def hf_state_dict(model: Any, tensors: Mapping[str, Tensor] | None = None) -> HFStateDict:
    """The form of a Hugging Face model, of a model with a peft adapter (the adapter alone), or of a `ModelHead`.

    Args:
        tensors: those of `live_tensors` made whole, for a model that has only parts of them.
    """
    tensors = live_tensors(model) if tensors is None else tensors
    found = saved_tensors(model, tensors)
    return HFStateDict({name: found[name] for name in sorted(found)}, saved_file(model), small_files(model, tensors))


def saved_file(model: Any) -> str | None:
    """The file that takes the tensors, or None for `model.safetensors` and its shards."""
    return ADAPTER_FILE if hasattr(head_of(model).backbone, "peft_config") else None


def saved_tensors(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some of the tensors of `live_tensors` under their names in the files; those of a `ModelHead`'s head are none."""
    head = head_of(model)
    core, own = head.backbone, head.split(tensors)[0]
    if hasattr(core, "peft_config"):
        from peft import get_peft_model_state_dict

        adapter = get_peft_model_state_dict(core, state_dict=own)
        return {name: x.detach() for name, x in adapter.items()}
    return _weights(core, own)


def names_in_files(model: Any) -> dict[str, str] | None:
    """Name in the files -> name in `live_tensors`; None for a model that transformers converts when it is saved."""
    live, numbers, places = live_tensors(model), list[str](), dict[int, int]()
    for name, x in live.items():
        if id(x) not in places:
            places[id(x)] = len(numbers)
            numbers.append(name)
    standing_in = [torch.tensor(number) for number in range(len(numbers))]  # tied ones are one object here too
    try:
        saved = saved_tensors(model, {name: standing_in[places[id(x)]] for name, x in live.items()})
    except (RuntimeError, ValueError, IndexError):  # it cuts or joins them
        return None
    if any(x.ndim or x.dtype != torch.int64 for x in saved.values()):
        return None
    found = {name: numbers[int(x)] for name, x in saved.items()}
    return found if len(set(found.values())) == len(found) else None


def small_files(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """What lies beside the tensors: the configuration, and a `ModelHead`'s head, which is among `tensors`."""
    head = head_of(model)
    return {**_configuration(head.backbone), **head.files(head.split(tensors)[1])}


def _configuration(core: Any) -> dict[str, bytes]:
    with TemporaryDirectory() as directory, quiet_transformers():
        if hasattr(core, "peft_config"):
            core.peft_config[core.active_adapter].save_pretrained(directory)
            return {name: _in_order(data) for name, data in files_in(Path(directory)).items()}
        core.save_pretrained(directory, state_dict={})  # all but the weights
        return {name: data for name, data in files_in(Path(directory)).items() if not name.endswith(".safetensors")}


def as_torch_file(tensors: Mapping[str, Tensor]) -> bytes:
    """What `torch.save` writes, for tools that need it."""
    file = io.BytesIO()
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, file)
    return file.getvalue()


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """What `tokenizer.save_pretrained` writes."""
    with TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        return files_in(Path(directory))


def load_adapter(model: Any, file: Path) -> None:
    """Give a model with a peft adapter the adapter's weights from a file."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    weights = torch.load(file, map_location="cpu", weights_only=True) if file.suffix == ".bin" else load_file(file)
    with torch.no_grad():
        report = set_peft_model_state_dict(model, weights)
    assert not report.unexpected_keys, report.unexpected_keys


def files_in(directory: Path) -> dict[str, bytes]:
    """Files of a directory, in order of name."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _in_order(adapter_config: bytes) -> bytes:
    """The same with the names of its layers in order: peft has them in a set, which each process orders anew."""
    config = json.loads(adapter_config)
    if isinstance(names := config["target_modules"], list):
        config["target_modules"] = sorted(names)
    return json.dumps(config, indent=2, sort_keys=True).encode()


def _weights(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state as `save_pretrained` names it: tied weights once, and conversions made at loading undone."""
    if isinstance(model, OwnModule):
        return model.saved(tensors)
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = {name: tensor.detach() for name, tensor in tensors.items()}
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return dict(revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model)))
