"""A value head on any backbone: the critic's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verl.models.call import call_model
from verl.models.pretrained import VALUE_HEAD_FILE, quiet_transformers


@dataclass(frozen=True)
class ValueOutput:
    """What a critic returns.

    Attributes:
        values: [B S] the value of the text up to and including each position.
    """

    values: Tensor


class ValueModel(nn.Module):
    """A backbone and a linear head that reads one value from each hidden state.

    The head starts at zero, so an untrained critic predicts no reward anywhere and its first advantages are the plain
    returns. It is kept in float32 at least, whatever the backbone's dtype.
    """

    def __init__(self, backbone: Any):
        super().__init__()
        config = backbone.config.get_text_config()
        dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32
        self.backbone = backbone
        device = (
            "cpu" if backbone.device.type == "meta" else backbone.device
        )  # the backbone's weights are still to come
        self.head = nn.Linear(config.hidden_size, 1, device=device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def computes_in_own_type(self) -> tuple[nn.Module, ...]:
        """Values are regressed on in the head's own precision; see `verl.models.precision`."""
        return (self.head,)

    @property
    def config(self) -> Any:
        return self.backbone.config

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        probe: bool = False,
        **others: Any,
    ) -> ValueOutput:
        """Values of each position, [B S]; `others` are the backbone's own.

        Args:
            probe: give what a fixed random head reads from hidden states of unit size, since an untrained one sees
                nothing of them.
        """
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        others |= {name: x for name, x in given.items() if x is not None}
        hidden = call_model(self.backbone, input_ids=input_ids, use_cache=False, **others).last_hidden_state
        hidden = hidden.to(self.head.weight.dtype)
        return ValueOutput(values=_probed(hidden) if probe else self.head(hidden).squeeze(-1))

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.backbone.gradient_checkpointing_enable(**options)

    def load_head(self, file: Path) -> None:
        """Take the head from a file that `save_pretrained` wrote."""
        self.head.load_state_dict(load_file(file))

    def save_pretrained(self, directory: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the backbone as a Hugging Face directory and the head beside it.

        Args:
            state_dict: whole weights, for a model that has only parts of them.
        """
        state = self.state_dict() if state_dict is None else state_dict
        parts = {
            part: {name.removeprefix(part): x for name, x in state.items() if name.startswith(part)}
            for part in ("backbone.", "head.")
        }
        with quiet_transformers():
            self.backbone.save_pretrained(directory, state_dict=parts["backbone."])
        save_file(
            {name: p.detach().cpu().contiguous() for name, p in parts["head."].items()},
            directory / VALUE_HEAD_FILE,
        )


def _probed(hidden: Tensor) -> Tensor:
    """[B S D] to [B S], numbers of about unit size."""
    size = hidden.shape[-1]
    direction = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=hidden.dtype).to(hidden.device)
    return hidden / hidden.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-12) @ direction / size**0.5
