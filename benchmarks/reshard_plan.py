"""The plan of a 70B model from a training layout to a generation layout: seconds, traffic and rounds.

    python benchmarks/reshard_plan.py --ranks 64 128
    python benchmarks/reshard_plan.py --syncs       bytes and launches of a sync of 8B and 70B

723 tensors of Llama-3-70B in bfloat16, 64 MiB a round. Prints one JSON line: of each pair of layouts the seconds of
`reshard_plan`, moves, bytes over the lower bound, and the time of all rounds over the least by the
plan's own model (the busiest rank's bytes, sent or received). Needs no process group.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.ops.resharding.layout import Layout, Mesh, TensorLayout, volume
from verl.ops.resharding.plan import Plan, lower_bound, reshard_plan
from verl.ops.resharding.rounds import Move, part_of_round
from verl.rollout.weight_sync.transfer import buckets

VOCABULARY, KV = 128256, 1024


@dataclass(frozen=True)
class Llama:
    """Shape of a Llama 3 model."""

    layers: int
    hidden: int
    inner: int

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Of a layer: name -> shape, axis under tensor parallelism."""
        hidden, inner = self.hidden, self.inner
        return {
            "self_attn.q_proj.weight": ((hidden, hidden), 0),
            "self_attn.k_proj.weight": ((KV, hidden), 0),
            "self_attn.v_proj.weight": ((KV, hidden), 0),
            "self_attn.o_proj.weight": ((hidden, hidden), 1),
            "mlp.gate_proj.weight": ((inner, hidden), 0),
            "mlp.up_proj.weight": ((inner, hidden), 0),
            "mlp.down_proj.weight": ((hidden, inner), 1),
            "input_layernorm.weight": ((hidden,), None),
            "post_attention_layernorm.weight": ((hidden,), None),
        }


LLAMA_8B, LLAMA_70B = Llama(32, 4096, 14336), Llama(80, 8192, 28672)
LIMIT_BYTES = 64 * 2**20


def layout(pp: int = 1, dp: int = 1, fsdp: int = 1, tp: int = 1, model: Llama = LLAMA_70B) -> Layout:
    """The model over pp x dp x fsdp x tp ranks; whole along dp."""

    def tensor(shape: tuple[int, ...], axis: int | None, stage: int) -> TensorLayout:
        splits = [("tp", axis)] if tp > 1 and axis is not None else []
        splits += [("fsdp", 0)] if fsdp > 1 else []
        return TensorLayout(shape, tuple(splits), stage if pp > 1 else None, itemsize=2)

    found = {"model.embed_tokens.weight": tensor((VOCABULARY, model.hidden), 0, 0)}
    for layer in range(model.layers):
        for name, (shape, axis) in model.shapes.items():
            found[f"model.layers.{layer}.{name}"] = tensor(shape, axis, layer * pp // model.layers)
    found["model.norm.weight"] = tensor((model.hidden,), None, pp - 1)
    found["lm_head.weight"] = tensor((VOCABULARY, model.hidden), 0, pp - 1)
    return Layout(Mesh((("pp", pp), ("dp", dp), ("fsdp", fsdp), ("tp", tp))), found)


def pairs(ranks: int) -> dict[str, tuple[Layout, Layout]]:
    """Layouts of training and of generation."""
    return {
        "fsdp -> tp8": (layout(fsdp=ranks), layout(dp=ranks // 8, tp=8)),
        "fsdp x tp8 -> tp4": (layout(fsdp=ranks // 8, tp=8), layout(dp=ranks // 4, tp=4)),
        "hsdp (8 a replica) -> tp8": (layout(dp=ranks // 8, fsdp=8), layout(dp=ranks // 8, tp=8)),
        "pp4 x fsdp x tp4 -> tp8": (layout(pp=4, fsdp=ranks // 16, tp=4), layout(dp=ranks // 8, tp=8)),
        "tp8 -> pp4 x tp4": (layout(dp=ranks // 8, tp=8), layout(pp=4, dp=ranks // 16, tp=4)),
        "fsdp -> whole": (layout(fsdp=ranks), layout(dp=ranks)),
    }


def moves_of(plan: Plan) -> list[Move]:
    """All moves as objects: for small plans."""
    return plan.table.moves(np.arange(len(plan.table)))


def rounds_of(plan: Plan, limit_bytes: int, rank: int | None = None) -> Iterator[list[Move]]:
    """The moves, or those of one rank, in rounds that follow one another."""
    for window in plan.windows(limit_bytes):
        yield from window.rounds(rank)


def traffic(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that each rank sends, and bytes that it receives, [ranks]."""
    table = plan.table
    sent, received = (
        np.bincount(ends, table.num_bytes, plan.source.mesh.size).astype(np.int64)
        for ends in (table.source, table.target)
    )
    return sent, received


def least_bytes(plan: Plan) -> int:
    """The most that a rank sends or receives: what the exchange takes at least, in bytes of one rank's link."""
    return int(max(x.max() for x in traffic(plan)))


def round_bytes(plan: Plan, limit_bytes: int) -> list[int]:
    """The most that a rank sends or receives in each round: what the round takes, in bytes of one rank's link."""
    ranks, largest = plan.source.mesh.size, []
    for window in plan.windows(limit_bytes):
        for moves in window.exact:
            ends = [np.array([getattr(move, end) for move in moves]) for end in ("source", "target")]
            sizes = np.array([move.num_bytes for move in moves])
            largest.append(max(int(np.bincount(x, sizes, ranks).max()) for x in ends))
        table, rows = window.table, window.table.rows_of(window.tensors)
        used, index = np.unique(table.box[rows], return_inverse=True)
        for number in range(window.num_rounds):
            parts = [part_of_round(table.slices[box], number, window.num_rounds) for box in used.tolist()]
            shares = np.array([(last - first) / length for _, first, last, length in parts])
            sizes = table.num_bytes[rows] * shares[index]
            ends = (table.source[rows], table.target[rows])
            largest.append(max(int(np.rint(np.bincount(x, sizes, ranks).max())) for x in ends))
    return largest


def measure(source: Layout, target: Layout) -> dict[str, Any]:
    """Of one pair of layouts."""
    began = time.perf_counter()
    plan: Plan = reshard_plan(source, target)
    planned = time.perf_counter()
    rounds = round_bytes(plan, LIMIT_BYTES)
    return {
        "plan_s": round(planned - began, 3),
        "moves": len(plan.table),
        "gib": round(plan.num_bytes / 2**30, 1),
        "over_lower_bound": plan.num_bytes / max(1, lower_bound(source, target)),
        "rounds": len(rounds),
        "over_least_time": round(sum(rounds) / max(1, least_bytes(plan)), 3),
        "least_over_mean": round(least_bytes(plan) * source.mesh.size / max(1, plan.num_bytes), 3),
    }


SYNCS = {  # of docs/scaling.md
    "8B, 8 GPUs, fsdp, an engine in each": (
        layout(fsdp=8, model=LLAMA_8B),
        layout(dp=8, model=LLAMA_8B),
    ),
    "8B, 8 GPUs, fsdp, engines of 2": (layout(fsdp=8, model=LLAMA_8B), layout(dp=4, tp=2, model=LLAMA_8B)),
    "70B, 64 GPUs, fsdp, engines of 8": (layout(fsdp=64), layout(dp=8, tp=8)),
    "70B, 64 GPUs, hsdp (8 a replica), engines of 8": (layout(dp=8, fsdp=8), layout(dp=8, tp=8)),
    "70B, 64 GPUs, fsdp x tp8, engines of 8": (layout(fsdp=8, tp=8), layout(dp=8, tp=8)),
}


def sync_line(name: str) -> str:
    """A line of the table in docs/scaling.md, of the GPU that has most of each."""
    source, target = SYNCS[name]
    plan: Plan = reshard_plan(source, target)
    sends: Counter[int] = Counter()
    receives: Counter[int] = Counter()
    rounds = 0
    for bucket in buckets(plan, LIMIT_BYTES):  # one after another, each in rounds of its own
        for moves in rounds_of(bucket, LIMIT_BYTES):
            rounds += 1
            sends.update(move.source for move in moves)
            receives.update(move.target for move in moves)
    ranks = range(source.mesh.size)
    calls = max(sends[rank] + receives[rank] for rank in ranks)
    held = max(sum(source.holds(rank, tensor) is not None for tensor in source.tensors) for rank in ranks)
    loaded = sum(volume(box) * target.tensors[t].itemsize for t in target.tensors if (box := target.holds(0, t)))
    out, into = (x.max() / 2**30 for x in traffic(plan))
    return f"| {name} | {out:.1f} | {into:.1f} | {loaded / 2**30:.1f} | {rounds} | {calls:,} | {held} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--syncs", action="store_true", help="print what a sync sends")
    options = parser.parse_args()
    if options.syncs:
        print(*map(sync_line, SYNCS), sep="\n")
        return
    found = {f"{n} ranks, {name}": measure(*pair) for n in options.ranks for name, pair in pairs(n).items()}
    rows = [
        [
            f"resharding plan of a 70B model, {name}",
            f"{one['plan_s']:.2f} s, {one['over_least_time']:.2f}x of the least time",
            f"{one['moves']} moves, {one['gib']} GiB, {one['over_lower_bound']:.2f}x of the lower bound; target: 10 s, "
            "1.2x, 1.0x",
        ]
        for name, one in found.items()
    ]
    print(json.dumps({"benchmark": "reshard_plan", **vars(options), "found": found, "rows": rows}))


if __name__ == "__main__":
    main()
