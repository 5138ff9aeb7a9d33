"""A model as Hugging Face saves it, but in memory: which tensors under which names, and the small files beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.models.heads import ValueModel
from verl.models.pretrained import VALUE_HEAD_FILE, quiet_transformers

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_BIN = "adapter_model.bin"  # for tools that need it


@dataclass(frozen=True)
class SavedForm:
    """What a directory made by `save_pretrained` holds.

    Attributes:
        tensors: the live weights under their names in the file; tied ones once.
        file: the file that takes them, or None for `model.safetensors` and its shards.
        files: small files by name.
    """

    tensors: Mapping[str, Tensor]
    file: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def live_tensors(model: Any) -> dict[str, Tensor]:
    """What `saved_form` makes its tensors of, by their names in the model; a tied one is the same object twice."""
    tensors = model.state_dict(keep_vars=True)
    if not hasattr(model.backbone if isinstance(model, ValueModel) else model, "peft_config"):
        return tensors
    return {name: x for name, x in tensors.items() if "lora_" in name or name.startswith("head.")}


def saved_form(model: Any, tensors: Mapping[str, Tensor] | None = None) -> SavedForm:
    """The form of a Hugging Face model, of a model with a peft adapter (the adapter alone), or of a `ValueModel`.

    Args:
        tensors: those of `live_tensors` made whole, for a model that has only parts of them.
    """
    tensors = live_tensors(model) if tensors is None else tensors
    if isinstance(model, ValueModel):
        form = saved_form(model.backbone, _below("backbone.", tensors))
        from safetensors.torch import save

        head = {name: p.detach().cpu().contiguous() for name, p in _below("head.", tensors).items()}
        return SavedForm(form.tensors, form.file, {**form.files, VALUE_HEAD_FILE: save(head)})
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        with tempfile.TemporaryDirectory() as directory, quiet_transformers():
            model.peft_config[model.active_adapter].save_pretrained(directory)
            files = files_in(Path(directory))
        adapter = get_peft_model_state_dict(model, state_dict=dict(tensors))
        return SavedForm({name: x.detach() for name, x in adapter.items()}, ADAPTER_FILE, files)
    with tempfile.TemporaryDirectory() as directory, quiet_transformers():
        model.save_pretrained(directory, state_dict={})  # all but the weights
        files = {name: data for name, data in files_in(Path(directory)).items() if not name.endswith(".safetensors")}
    return SavedForm(_weights(model, tensors), None, files)


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """What `tokenizer.save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as directory:
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


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _weights(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state as `save_pretrained` names it: tied weights once, and conversions made at loading undone."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = {name: tensor.detach() for name, tensor in tensors.items()}
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return dict(revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model)))
