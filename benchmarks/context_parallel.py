"""Context parallelism: two processes split the tokens of a long row (`sharding=parallel sharding.cp=2`), a thread each.

python benchmarks/context_parallel.py [--large] [--tokens 16384] [--style allgather]

Seconds of a forward and backward pass of one row, the bytes of its activations, and the bytes that the processes
exchange for attention. Three cases alternate in the same two processes: both split one row; both run a whole row each
independently (the limit of the machine is two rows in that time); one runs a row alone.

Activations are counted at dispatch: bytes of all storages alive that operations have made, at their peak, with weights
and their gradients left out. Traffic is counted in the collectives that attention calls, as numbers that a process has
to send, and compared with `Parallel.context_elements`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from verl.component import BuildContext
from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.parallel_dims import Parallelism
from verl.engines.sharding import Parallel
from verl.model_paths import context_attention
from verl.model_paths.check import paths_for
from verl.model_paths.families import family_table
from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.models.heads import LMHead
from verl.models.model_stats import model_stats
from verl.models.tiny import TinyModel
from verl.ops.masking import LossTotals, aggregate
from verl.protocol import DataProto
from verl.trainer.plan.activations import LiveBytes

SPEED, ACTIVATIONS = 0.9, 0.55  # targets
FAST = family_table().paths[family_table().families["qwen2"][0].paths]


class Counted:
    """Numbers that this process sends in the collectives of attention, by ring algorithms."""

    def __init__(self) -> None:
        self.sent = 0.0
        self._real = dist

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def all_gather_single(self, found: torch.Tensor, own: torch.Tensor, group: Any = None) -> Any:
        self.sent += found.numel() - own.numel()
        return self._real.all_gather_single(found, own, group=group)

    def reduce_scatter_single(self, own: torch.Tensor, sent: torch.Tensor, group: Any = None) -> Any:
        self.sent += sent.numel() - own.numel()
        return self._real.reduce_scatter_single(own, sent, group=group)

    def all_to_all_single(self, found: torch.Tensor, sent: torch.Tensor, takes: Any, gives: Any, group: Any) -> Any:
        self.sent += sent.numel() * (1 - gives[dist.get_rank(group)] / sum(gives))
        return self._real.all_to_all_single(found, sent, takes, gives, group=group)


def row(tokens: int, vocabulary: int) -> DataProto:
    """One row of a short prompt and a response."""
    ids = torch.randint(4, vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, tokens - 15, dtype=torch.bool)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(tokens + 1)[None],
            "responses": ids[:, 16:],
            "response_mask": mask,
        }
    )


class Side:
    """A model and how its rows are run."""

    def __init__(self, model: Any, parallel: Parallelism):
        self.model, self.parallel = model, parallel
        paths_for(model, 64, shares_tokens=parallel.shares_tokens)
        parallel.shard_model(model)
        self.head = LMHead(model)

    def run(self, rows: DataProto) -> None:
        """A forward and a backward pass."""
        for micro in cut_into_micro_batches(rows, 1, FAST, self.parallel.context):
            log_probs = token_log_probs(self.model, self.head, micro).log_probs
            totals = LossTotals(tokens=float(rows["response_mask"].sum()), sequences=1.0)
            aggregate(-log_probs, micro.tensors["response_mask"], "token-mean", totals).backward()
        for parameter in self.model.parameters():
            parameter.grad = None

    def activations(self, rows: DataProto) -> int:
        with LiveBytes() as counted:
            counted.watch(self.model)
            self.run(rows)
        return counted.peak


def worker(rank: int, place: Path, tokens: int, rounds: int, style: str, large: bool) -> None:
    """One of the two processes; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_layers": 4, "num_heads": 8} if large else {}
    source = TinyModel(context_length=2 * tokens, **shape)
    sharding = Parallel(cp=2, cp_style=style)
    shared = Side(source.load_causal_lm("cpu"), sharding.build(BuildContext(rank=rank, world_size=2)))
    alone = Side(source.load_causal_lm("cpu"), Parallelism())
    rows = row(tokens, source.load_config().vocab_size)

    def timed(run: Any) -> float:
        dist.barrier()
        start = time.perf_counter()
        run()
        dist.barrier()
        return time.perf_counter() - start

    took: dict[str, list[float]] = {"shared": [], "both": [], "one": []}
    for _ in range(rounds + 1):
        took["shared"].append(timed(lambda: shared.run(rows)))
        took["both"].append(timed(lambda: alone.run(rows)))
        took["one"].append(timed(lambda: alone.run(rows) if rank == 0 else None))
    context_attention.dist = counted = Counted()  # type: ignore[attr-defined]
    shared.run(rows)
    context_attention.dist = dist  # type: ignore[attr-defined]
    whole, part = alone.activations(rows), shared.activations(rows)
    formula = sharding.context_elements(model_stats(source.load_config()), tokens // 2)
    if rank == 0:
        found = {"took": {name: x[1:] for name, x in took.items()}, "whole": whole, "part": part}
        print(json.dumps(found | {"sent": counted.sent, "formula": formula}), flush=True)
    dist.destroy_process_group()


def result_of(found: dict[str, Any], tokens: int, style: str) -> dict[str, Any]:
    took = found["took"]
    share = [both / 2 / shared for both, shared in zip(took["both"], took["shared"], strict=True)]
    speedup = [one / shared for one, shared in zip(took["one"], took["shared"], strict=True)]
    low, middle, high = quantiles(share, n=4) if len(share) > 1 else share * 3
    memory, traffic = found["part"] / found["whole"], found["sent"] / found["formula"]
    return found | {
        "share_of_two_independent": share,
        "speedup": speedup,
        "activations": memory,
        "traffic_of_formula": traffic,
        "cores": os.cpu_count(),
        "rows": [
            [
                f"one row of {tokens} tokens, two processes under `sharding.cp=2`, {style}, a thread each",
                f"{middle:.0%} ({low:.0%}-{high:.0%}) of two independent processes; {median(speedup):.2f}x of one; "
                f"activations {memory:.2f}x; bytes sent {traffic:.3f}x of the formula",
                f"{median(took['one']):.2f} s; targets: at least {SPEED:.0%}, at most {ACTIVATIONS}x, within 1%",
            ]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="a model of 12 million parameters, not of 0.2 million")
    parser.add_argument("--tokens", type=int, default=16384, help="of the row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--style", default="allgather", choices=["allgather", "ulysses"])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        worker(chosen.rank, chosen.place, chosen.tokens, chosen.rounds, chosen.style, chosen.large)
        return
    with tempfile.TemporaryDirectory() as directory:
        same = [*sys.argv[1:], "--place", str(Path(directory) / "meeting")]
        command = [sys.executable, __file__, *same]
        other = subprocess.Popen([*command, "--rank", "1"])
        try:
            first = subprocess.run([*command, "--rank", "0"], stdout=subprocess.PIPE, text=True, check=True)
        finally:
            other.kill()
            other.wait()
    print(json.dumps(result_of(json.loads(first.stdout.splitlines()[-1]), chosen.tokens, chosen.style)))


if __name__ == "__main__":
    main()
