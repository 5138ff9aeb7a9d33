"""Any torch module as a policy, user-defined or from a library such as Megatron-core.

    ModuleModel.build_part(tp_rank) ──> ModulePart: the module of this process, and how its tensors are sharded
                                 ──> OwnModule, which trains, generates, saves and loads like other models

The module is called as `module(input_ids, attention_mask)` and returns logits [B S V], or an object with `logits`. It
may shard its layers over the tensor-parallel processes in any way, and does its own communication. Its parameters are
plain tensors; `TensorPart` says which shard each of them is.
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
from verl.models.model_files import SafetensorsReader
from verl.models.pretrained import ModelSource
from verl.ops.resharding.layout import Box

PREFIX = "module."


@dataclass(frozen=True)
class TensorPart:
    """Sharding of a parameter over the tensor-parallel processes.

    Attributes:
        dim: dimension of equal shards, in rank order; None for a replicated parameter.
        sums_gradient: for a replicated parameter, whether each process computes only a partial gradient, as for a norm
            over its own heads; else all compute the same gradient.
    """

    dim: int | None = None
    sums_gradient: bool = False


@dataclass(frozen=True)
class TPRank:
    """The tensor-parallel rank that a module is built for.

    Attributes:
        rank, size: rank of this process, and number of tensor-parallel processes.
        group: their process group; None for a single process.
    """

    rank: int = 0
    size: int = 1
    group: Any = None


@dataclass(frozen=True)
class ModulePart:
    """The module of one process.

    Attributes:
        module: the torch module.
        parts: sharding of its parameters by name; parameters that are not listed are replicated.
    """

    module: nn.Module
    parts: Mapping[str, TensorPart] = field(default_factory=dict)


class OwnModule(nn.Module):
    """Wraps a user-defined module so that it can be trained, saved and sampled from like other policies.

    Args:
        part: the module of this process.
        sizes: see `ModuleModel.sizes`.
        tp_rank: the rank that it was built for.
    """

    lm_head = None  # the output head is inside the module
    base_model_prefix = "module"

    def __init__(self, part: ModulePart, sizes: Mapping[str, Any], tp_rank: TPRank):
        from transformers import GenerationConfig, PretrainedConfig

        super().__init__()
        self.module, self.tp_rank, self.sizes = part.module, tp_rank, dict(sizes)
        self.config = PretrainedConfig(**sizes)
        self.generation_config = GenerationConfig(eos_token_id=sizes.get("eos_token_id"))
        unknown = part.parts.keys() - dict(self.module.named_parameters()).keys()
        if unknown:
            raise ConfigError(f"build_part lists {', '.join(sorted(unknown))}: the module has no such parameters.")
        self.parts = {PREFIX + name: described for name, described in part.parts.items()}

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        output = self.module(input_ids, mask)
        return SimpleNamespace(logits=output) if isinstance(output, Tensor) else output

    def get_output_embeddings(self) -> None:
        """None: the head cannot be called separately."""

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        raise ConfigError("gradient_checkpointing is true: a user-defined module must do it itself. Set it to false.")

    def part_of(self, name: str) -> TensorPart:
        """The sharding of a parameter by its name in this module."""
        return self.parts.get(name, TensorPart())

    def box_of(self, name: str, x: Tensor) -> Box:
        """The slice of the unsharded tensor that a parameter holds."""
        sides = [(0, size) for size in x.shape]
        if (dim := self.part_of(name).dim) is not None:
            first = self.tp_rank.rank * x.shape[dim]
            sides[dim] = (first, first + x.shape[dim])
        return tuple(sides)

    @staticmethod
    def saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename tensors to their names in a file; tied ones once."""
        seen, by_name = set[int](), {}
        for name, x in tensors.items():
            if id(x) not in seen:
                seen.add(id(x))
                by_name[name.removeprefix(PREFIX)] = x.detach()
        return by_name

    def save_pretrained(self, directory: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write `model.safetensors` and `config.json`; only the latter if `state_dict` is empty."""
        from safetensors.torch import save_file

        (folder := Path(directory)).mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "own_module", **self.sizes}, indent=2) + "\n")
        tensors = self.saved(self.state_dict(keep_vars=True) if state_dict is None else state_dict)
        if tensors:
            whole = {name: tensors[name].cpu().contiguous() for name in sorted(tensors)}
            save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


@component
class ModuleModel(ModelSource):
    """Base class of components for user-defined modules; a subclass implements `build_part` and `sizes`.

    Args:
        path: a directory with `model.safetensors`, as a run saves it; null for the initial weights of `build_part`.
            Each process reads only its shards.
        tokenizer_path: directory of the tokenizer; null for `path`.
    """

    path: str | None = None
    tokenizer_path: str | None = None

    def build_part(self, tp_rank: TPRank) -> ModulePart:
        """Build the module of a process. Its initial weights must not depend on the number of processes."""
        raise NotImplementedError

    def sizes(self) -> dict[str, Any]:
        """Sizes of the module without building it: `vocab_size`, `num_hidden_layers`, `hidden_size`, optionally
        `max_position_embeddings`, `eos_token_id` and others by the names of transformers.
        """
        raise NotImplementedError

    def at(self, path: str) -> ModuleModel:
        return replace(self, path=path)

    def load_part(self, device: str, tp_rank: TPRank) -> OwnModule:
        """Build the module of a process and load its weights.

        Raises:
            ConfigError: the weights at `path` do not fit this module.
        """
        model = OwnModule(self.build_part(tp_rank), self.sizes(), tp_rank)
        model = model.to(device=device, dtype=getattr(torch, self.dtype)).eval()
        if self.path is not None:
            reader = SafetensorsReader(Path(self.path), "module")
            with torch.no_grad():
                for name, x in model.named_parameters():
                    if reader.name_of(name) is None:
                        raise ConfigError(f"path is {self.path!r}: it has no tensor {name.removeprefix(PREFIX)}.")
                    part = reader.read(name, model.box_of(name, x))
                    if part.shape != x.shape:
                        want, has = list(x.shape), list(part.shape)
                        raise ConfigError(f"path is {self.path!r}: {name.removeprefix(PREFIX)} is {has}, not {want}.")
                    x.copy_(part)
        return model

    def load_causal_lm(self, device: str) -> Any:
        return self.load_part(device, TPRank())

    def load_backbone(self, device: str) -> Any:
        raise ConfigError(
            f"model is a {type(self).__name__}: critics and reward models must be models of transformers. Choose an "
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
