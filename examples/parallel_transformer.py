"""A user-defined transformer that shards its own layers over processes, trained by GRPO.

    python examples/parallel_transformer.py

A `ModuleModel` builds the module of each process and declares how its tensors are sharded; verl trains, saves and
resumes it, and samples responses by its forward. Here two processes split each layer for ten steps, as in Megatron-LM
(Shoeybi et al. 2019, arXiv:1909.08053): queries, keys, values and the first matrix of the MLP by columns, the following
matrices by rows. Then one process resumes from their checkpoint. Modules of libraries can be used in the same way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from verl.component import component
from verl.models.own_module import ModuleModel, ModulePart, TensorPart, TPRank
from verl.models.tiny import TinyModel

CONTEXT = 64


class _SumBackward(torch.autograd.Function):
    """Input of a column-parallel layer: identity; the backward pass sums gradients over the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumForward(torch.autograd.Function):
    """Output of a row-parallel layer: sums over the processes; the backward pass is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Layer(nn.Module):
    """Attention and MLP; each process has some of the heads and of the MLP width."""

    def __init__(self, width: int, heads: int, tp_rank: TPRank):
        super().__init__()
        self.heads, self.group = heads // tp_rank.size, tp_rank.group
        own = width // tp_rank.size
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, own, bias=False) for _ in range(3))
        self.out = nn.Linear(own, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * own, bias=False), nn.Linear(4 * own, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self._into(self.before_attention(x))
        q, k, v = (z(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (self.query, self.key, self.value))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self._out_of(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self._out_of(self.down(F.gelu(self.up(self._into(self.before_mlp(x))))))

    def _into(self, x: Tensor) -> Tensor:
        return x if self.group is None else _SumBackward.apply(x, self.group)

    def _out_of(self, x: Tensor) -> Tensor:
        return x if self.group is None else _SumForward.apply(x, self.group)


COLUMNS, ROWS = ("query", "key", "value", "up"), ("out", "down")


class Transformer(nn.Module):
    """A decoder with learned positions. verl only calls `forward(input_ids, attention_mask)`."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, tp_rank: TPRank):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width, heads, tp_rank) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        causal = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool, device=input_ids.device).tril()
        mask = causal & attention_mask.bool()[:, None, None, :]
        mask = mask | torch.eye(input_ids.shape[1], dtype=torch.bool, device=input_ids.device)  # padding sees itself
        x = self.embedding(input_ids) + self.positions(places)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


@component
class ParallelTransformer(ModuleModel):
    """The model of a run; `conf/actor/parallel_transformer.yaml` beside this file is the actor that trains it.

    Args:
        width, heads, depth: of the transformer; the number of tensor-parallel processes must divide `heads`.
    """

    width: int = 64
    heads: int = 4
    depth: int = 2

    def build_part(self, tp_rank: TPRank) -> ModulePart:
        vocabulary = self.sizes()["vocab_size"]
        module = Transformer(vocabulary, self.width, self.heads, self.depth, tp_rank)
        whole = Transformer(vocabulary, self.width, self.heads, self.depth, TPRank())  # small enough to be made
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for x in whole.parameters():
                if x.ndim > 1:
                    x.copy_(torch.randn(x.shape, generator=draw) * 0.06)
        parts, values = {}, dict(whole.named_parameters())
        for name, x in module.named_parameters():
            layer = name.split(".")[-2] if "." in name else ""
            dim = 0 if layer in COLUMNS else 1 if layer in ROWS else None
            parts[name] = TensorPart(dim=dim)
            value = values[name] if dim is None else values[name].chunk(tp_rank.size, dim)[tp_rank.rank]
            x.data.copy_(value)
        return ModulePart(module, parts)

    def sizes(self) -> dict[str, Any]:
        tokenizer = self.load_tokenizer()
        return {
            "vocab_size": len(tokenizer),
            "hidden_size": self.width,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "max_position_embeddings": CONTEXT,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }

    def attention_heads(self) -> tuple[int, int]:
        return self.heads, self.heads

    def load_tokenizer(self) -> Any:
        return TinyModel(context_length=CONTEXT).load_tokenizer()


def digits(prompts: list[str], responses: list[str]) -> list[float]:
    """The reward: the share of digits in a response of four characters."""
    return [sum(c in "0123456789" for c in text) / 4 for text in responses]


def main() -> None:
    here = Path(__file__).resolve()
    run = ["ppo", "--config-dir", str(here.parent / "conf"), "actor=parallel_transformer", "critic=same_as_actor"]
    run += ["algorithm=grpo", "reward=function", f"reward.path={here}:digits", "rollout.max_new_tokens=4"]
    run += ["data.digits=1", "data.held_out=4", "trainer.prompts_per_step=16", "trainer.group_size=8"]
    run += ["trainer.eval_interval=0", "trainer.eval_before=false", "checkpoint.save_interval=10"]
    run += ["trainer.experiment_name=parallel_transformer", "trainer.total_steps=20"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path])}
    for more in (["sharding=tp", "trainer.n_gpus_per_node=2", "trainer.stop_after=10"], ["resume=latest"]):
        subprocess.run([sys.executable, "-m", "verl.cli", *run, *more], env=environment, check=True)


if __name__ == "__main__":
    main()
