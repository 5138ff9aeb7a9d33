"""Any torch module as a policy: one of the user's own, or one that a library such as Megatron-core makes.

    ModuleModel.build_part(place) ──> ModulePart: the module of this process, and how its tensors are divided
                                 ──> OwnModule, which trains, generates, saves and loads as other models do

The module is called as `module(input_ids, attention_mask)` and gives logits [B S V], or something that has `logits`. It
may divide its layers over the tensor-parallel processes as it likes, and exchanges what it needs by itself; what it
holds are plain tensors, and `TensorPart` says which part of what each of them is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from verl.component import component
from verl.errors import ConfigError
from verl.models.pretrained import ModelSource, SafetensorsReader
from verl.resharding.layout import Box

PREFIX = "module."


@dataclass(frozen=True)
class TensorPart:
    """What a tensor of this process is a part of.

    Attributes:
        dim: along which the tensor-parallel processes have equal parts, in the order of their ranks; None for a tensor
            that each of them has whole.
        sums_gradient: of a whole tensor, each process computes a part of its gradient, such as that of a norm over its
            own heads; else all of them compute all of it.
    """

    dim: int | None = None
    sums_gradient: bool = False


@dataclass(frozen=True)
class ModulePlace:
    """For which process a module is made.

    Attributes:
        rank, size: among the tensor-parallel processes.
        group: of torch.distributed, those processes; None where there is one.
    """

    rank: int = 0
    size: int = 1
    group: Any = None


@dataclass(frozen=True)
class ModulePart:
    """A module of one process.

    Attributes:
        module: see above.
        parts: of its parameters by name; one that is not named is whole in each process.
    """

    module: nn.Module
    parts: Mapping[str, TensorPart] = field(default_factory=dict)


class OwnModule(nn.Module):
    """A module of the user's, in the form in which policies are trained, saved and asked for tokens.

    Args:
        part: the module of this process.
        sizes: see `ModuleModel.sizes`.
        place: for which it was made.
    """

    lm_head = None  # there is one, and it is the module's own affair
    base_model_prefix = "module"

    def __init__(self, part: ModulePart, sizes: Mapping[str, Any], place: ModulePlace):
        from transformers import GenerationConfig, PretrainedConfig

        super().__init__()
        self.module, self.place, self.sizes = part.module, place, dict(sizes)
        self.config = PretrainedConfig(**sizes)
        self.generation_config = GenerationConfig(eos_token_id=sizes.get("eos_token_id"))
        unknown = part.parts.keys() - dict(self.module.named_parameters()).keys()
        if unknown:
            raise ConfigError(f"build_part describes {', '.join(sorted(unknown))}: the module has no such parameters.")
        self.parts = {PREFIX + name: described for name, described in part.parts.items()}

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        found = self.module(input_ids, mask)
        return SimpleNamespace(logits=found) if isinstance(found, Tensor) else found

    def get_output_embeddings(self) -> None:
        """The head cannot be called apart from the module."""

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        raise ConfigError("gradient_checkpointing is true: a module of one's own recomputes what it likes by itself.")

    def part_of(self, name: str) -> TensorPart:
        """Of a parameter by its name here."""
        return self.parts.get(name, TensorPart())

    def box_of(self, name: str, x: Tensor) -> Box:
        """The slice of the whole tensor that a parameter is."""
        sides = [(0, size) for size in x.shape]
        if (dim := self.part_of(name).dim) is not None:
            first = self.place.rank * x.shape[dim]
            sides[dim] = (first, first + x.shape[dim])
        return tuple(sides)

    @staticmethod
    def saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by their names in a file; tied ones once."""
        seen, found = set[int](), {}
        for name, x in tensors.items():
            if id(x) not in seen:
                seen.add(id(x))
                found[name.removeprefix(PREFIX)] = x.detach()
        return found

    def save_pretrained(self, directory: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write `model.safetensors` and `config.json`; without tensors in `state_dict` the latter alone."""
        from safetensors.torch import save_file

        (place := Path(directory)).mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps({"model_type": "own_module", **self.sizes}, indent=2) + "\n")
        tensors = self.saved(self.state_dict(keep_vars=True) if state_dict is None else state_dict)
        if tensors:
            whole = {name: tensors[name].cpu().contiguous() for name in sorted(tensors)}
            save_file(whole, place / "model.safetensors", metadata={"format": "pt"})


@component
class ModuleModel(ModelSource):
    """Base of models that are any torch module; a subclass says by `build_part` what each process has of it.

    Args:
        path: a directory with weights in `model.safetensors`, as a run saves them; null for those that `build_part`
            makes. Each process reads its parts alone.
        tokenizer_path: where the tokenizer lies; null: with the weights.
    """

    path: str | None = None
    tokenizer_path: str | None = None

    def build_part(self, place: ModulePlace) -> ModulePart:
        """The module of a process, with its first weights, the same for every number of processes."""
        raise NotImplementedError

    def sizes(self) -> dict[str, Any]:
        """What is known of the module without making it: `vocab_size`, `num_hidden_layers`, `hidden_size`, and perhaps
        `max_position_embeddings`, `eos_token_id` and others by transformers' names."""
        raise NotImplementedError

    def at(self, path: str) -> ModuleModel:
        return replace(self, path=path)

    def load_part(self, device: str, place: ModulePlace) -> OwnModule:
        """What a process has of the module.

        Raises:
            ConfigError: the weights at `path` are not those of this module.
        """
        model = OwnModule(self.build_part(place), self.sizes(), place)
        model = model.to(device=device, dtype=getattr(torch, self.dtype)).eval()
        if self.path is not None:
            reader = SafetensorsReader(Path(self.path), "module")
            with torch.no_grad():
                for name, x in model.named_parameters():
                    if reader.name_of(name) is None:
                        raise ConfigError(f"path is {self.path!r}: it has no tensor {name.removeprefix(PREFIX)}.")
                    found = reader.read(name, model.box_of(name, x))
                    if found.shape != x.shape:
                        want, has = list(x.shape), list(found.shape)
                        raise ConfigError(f"path is {self.path!r}: {name.removeprefix(PREFIX)} is {has}, not {want}.")
                    x.copy_(found)
        return model

    def load_causal_lm(self, device: str) -> Any:
        return self.load_part(device, ModulePlace())

    def load_backbone(self, device: str) -> Any:
        raise ConfigError(
            f"model is a {type(self).__name__}: a critic or a reward model needs a model of transformers. Choose an "
            "algorithm without a critic, such as algorithm=grpo, or give critic.model."
        )

    def load_config(self) -> Any:
        from transformers import PretrainedConfig

        return PretrainedConfig(**self.sizes())

    def load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if (where := self.tokenizer_path or self.path) is None:
            raise ConfigError(f"tokenizer_path is null: a {type(self).__name__} without path has none. Set it.")
        return AutoTokenizer.from_pretrained(where, padding_side="left")

    def max_positions(self) -> int | None:
        return self.sizes().get("max_position_embeddings")

    def layer_count(self) -> int | None:
        return self.sizes().get("num_hidden_layers")
