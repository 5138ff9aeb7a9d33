"""Models cut over ranks as vLLM cuts them, under the names of its classes, so that many ranks fit into one process."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

HEADS, KV_HEADS, SIZE, WIDTH, INNER, VOCAB = 4, 2, 8, 24, 20, 51


class Unquantized:
    """Multiplies, as an engine's layer without quantization does."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class LinearBase(nn.Module):
    """One rank's part of a layer, and the facts of it that vLLM's layers carry."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, **facts: Any):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.quant_method = Unquantized()
        for name, fact in facts.items():
            setattr(self, name, fact)


class ColumnParallelLinear(LinearBase):
    """Cut by outputs."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several such in one."""


class QKVParallelLinear(ColumnParallelLinear):
    """Cut by heads."""


class RowParallelLinear(LinearBase):
    """Cut by inputs."""


class VocabParallelEmbedding(LinearBase):
    """Cut by tokens."""


def full_weights() -> dict[str, Tensor]:
    """One layer, by the names of Hugging Face."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "embed_tokens.weight": drawn(VOCAB, WIDTH),
        "attn.q_proj.weight": drawn(HEADS * SIZE, WIDTH),
        "attn.q_proj.bias": drawn(HEADS * SIZE),
        "attn.k_proj.weight": drawn(KV_HEADS * SIZE, WIDTH),
        "attn.k_proj.bias": drawn(KV_HEADS * SIZE),
        "attn.v_proj.weight": drawn(KV_HEADS * SIZE, WIDTH),
        "attn.v_proj.bias": drawn(KV_HEADS * SIZE),
        "attn.o_proj.weight": drawn(WIDTH, HEADS * SIZE),
        "attn.o_proj.bias": drawn(WIDTH),
        "mlp.gate_proj.weight": drawn(INNER, WIDTH),
        "mlp.up_proj.weight": drawn(INNER, WIDTH),
        "norm.weight": drawn(WIDTH),
    }


def rank_model(weights: dict[str, Tensor], rank: int, size: int) -> nn.Module:
    """The part of one of `size` ranks; with more ranks than key heads, several hold the same of those."""
    replicas = max(1, size // KV_HEADS)
    kv_heads, kv_part = max(1, KV_HEADS // size), rank // replicas
    shared = {"tp_rank": rank, "tp_size": size}

    def rows(name: str, place: int, of: int) -> Tensor:
        whole = weights[name]
        count = len(whole) // of
        return whole[place * count : (place + 1) * count].clone()

    def qkv(kind: str) -> Tensor:
        kv = [rows(f"attn.{part}_proj.{kind}", kv_part, KV_HEADS // kv_heads) for part in "kv"]
        return torch.cat([rows(f"attn.q_proj.{kind}", rank, size), *kv])

    padded = torch.cat([weights["embed_tokens.weight"], torch.full((52 - VOCAB, WIDTH), 7.0)])
    per_rank = 52 // size
    start, inner = rank * per_rank, HEADS * SIZE // size
    model = nn.Module()
    model.embed_tokens = VocabParallelEmbedding(
        padded[start : start + per_rank].clone(),
        shard_indices=SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=min(VOCAB, start + per_rank)),
        org_vocab_size=VOCAB,
        embedding_dim=WIDTH,
    )
    model.lm_head = None
    model.attn, model.mlp = nn.Module(), nn.Module()
    model.attn.qkv_proj = QKVParallelLinear(
        qkv("weight"),
        qkv("bias"),
        input_size=WIDTH,
        head_size=SIZE,
        v_head_size=SIZE,
        total_num_heads=HEADS,
        num_heads=HEADS // size,
        total_num_kv_heads=KV_HEADS,
        num_kv_heads=kv_heads,
        num_kv_head_replicas=replicas,
        **shared,
    )
    model.attn.o_proj = RowParallelLinear(
        weights["attn.o_proj.weight"][:, rank * inner : (rank + 1) * inner].clone(),
        weights["attn.o_proj.bias"].clone(),
        input_size=HEADS * SIZE,
        input_size_per_partition=inner,
        output_size=WIDTH,
        **shared,
    )
    model.mlp.gate_up_proj = MergedColumnParallelLinear(
        torch.cat([rows(f"mlp.{part}_proj.weight", rank, size) for part in ("gate", "up")]),
        input_size=WIDTH,
        output_size=2 * INNER,
        output_sizes=[INNER, INNER],
        **shared,
    )
    model.norm = nn.Module()
    model.norm.weight = nn.Parameter(weights["norm.weight"].clone())
    return model
