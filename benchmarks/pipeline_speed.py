"""Two pipeline stages on two cores: seconds of an update, idle time, and bytes of a stage.

    python benchmarks/pipeline_speed.py --micro-batches 4 8 16

One update of a Llama-like model over the same rows, in turns: by two independent one-thread processes, each with half
of the rows and the whole model, and by two stages with m micro-batches. The limit of the second is m / (m + 1) of the
rate of the first. The idle time of a stage is compared with a replay of the schedule: the passes as this run has timed
them, each begun as soon as its stage is free and its input there. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.distributed.pipelining import PipelineStage

from verl.component import BuildContext
from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.engine import TrainingEngine
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import DataParallelism
from verl.engines.pipeline_parallelism import PipelineParallelism
from verl.engines.sharding import Parallel
from verl.models.heads import LMHead
from verl.models.pretrained import quiet_transformers
from verl.ops.resharding.dtensor import local
from verl.protocol import DataProto

ROW, PROMPT = 128, 32
ROWS_OF_A_MICRO_BATCH = 4


@dataclass(frozen=True)
class ChunkTime:
    """Time span of one forward or backward pass of a micro-batch through a stage, by `time.perf_counter`."""

    kind: str
    number: int
    start: float
    stop: float


@contextlib.contextmanager
def timed_passes() -> Iterator[list[ChunkTime]]:
    """The passes of the stages of this process within."""
    times: list[ChunkTime] = []

    def timed(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed_run(stage: PipelineStage, number: int, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            output = run(stage, number, *args, **kwargs)
            if kind == "forward" or stage.has_backward:
                times.append(ChunkTime(kind, number, start, time.perf_counter()))
            return output

        return timed_run

    names = {"forward": "forward_one_chunk", "backward": "backward_one_chunk"}
    with contextlib.ExitStack() as patches:
        for kind, name in names.items():
            run = timed(kind, getattr(PipelineStage, name))
            patches.enter_context(mock.patch.object(PipelineStage, name, run))
        yield times


def model(layers: int) -> Any:
    """A small Llama whose embedding and head are a small part."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=512, intermediate_size=1408, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False, max_position_embeddings=2 * ROW,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet_transformers():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def batch(rows: int) -> DataProto:
    """Rows of one length, with different prompts."""
    ids = torch.randint(0, 512, (rows, ROW), generator=torch.Generator().manual_seed(1))
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(ROW).expand_as(ids).contiguous(),
            "responses": ids[:, PROMPT:].contiguous(),
            "response_mask": torch.ones(rows, ROW - PROMPT, dtype=torch.bool),
        }
    )


def engine_of(parallel: Any, layers: int, budget: int) -> TrainingEngine:
    made = model(layers)
    parallel.shard_model(made)
    return TrainingEngine(made, parallel, budget, AdamW(lr=1e-4).for_model(made), 100)


def held_bytes(engine: TrainingEngine) -> dict[str, int]:
    """Of what this process holds, after an update."""
    own = [p for p in engine.parameters.values() if not p.is_meta]
    moments = [x for x in engine.optimizer_tensors().values() if not x.is_meta]
    return {
        "weights": sum(local(p).nbytes for p in own),
        "gradients": sum(local(p.grad).nbytes for p in own if p.grad is not None),
        "moments": sum(local(x).nbytes for x in moments),
    }


def update_s(engine: TrainingEngine, rows: DataProto) -> float:
    head = LMHead(engine.model)

    def loss(made: Any, micro: Any, totals: Any) -> Any:
        found = token_log_probs(made, head, micro).log_probs
        return -found.sum() / totals.tokens, {}

    engine.parallel.of_each({})  # all begin together
    began = time.perf_counter()
    engine.update(rows, loss)
    engine.parallel.of_each({})
    return time.perf_counter() - began


def order_1f1b(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """Passes of a stage in their order."""
    warm = min(count, stages - stage)
    found = [("forward", n) for n in range(warm)]
    for n in range(count):
        found.append(("backward", n))
        if warm + n < count:
            found.append(("forward", warm + n))
    return found


def replayed_idle(times: list[dict[tuple[str, int], float]]) -> list[float]:
    """The idle share of each stage if every pass begins as soon as it can."""
    stages, count = len(times), len(times[0]) // 2
    left = [order_1f1b(stage, stages, count) for stage in range(stages)]
    done: dict[tuple[int, str, int], float] = {}
    free = [0.0] * stages
    while any(left):
        for stage in range(stages):
            while left[stage]:
                kind, n = left[stage][0]
                needs = (stage - 1, kind, n) if kind == "forward" else (stage + 1, kind, n)
                if 0 <= needs[0] < stages and needs not in done:
                    break
                free[stage] = max(free[stage], done.get(needs, 0.0)) + times[stage][kind, n]
                done[stage, kind, n] = free[stage]
                left[stage].pop(0)
    return [1 - sum(own.values()) / max(free) for own in times]


def work(rank: int, rendezvous: str, counts: list[int], layers: int, turns: int, answers: Any) -> None:
    os.environ["VERL_RENDEZVOUS"] = f"file://{rendezvous}"
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    context = BuildContext(rank=rank, world_size=2)
    apart = DataParallelism(context, 600.0)
    apart.sum_gradients = lambda parameters: None  # type: ignore[method-assign]  # independent of each other
    found: dict[str, Any] = {}
    for count in counts:
        pipeline = Parallel(pp=2, pp_micro_batches=count).build(context)
        assert isinstance(pipeline, PipelineParallelism)
        budget, rows = ROWS_OF_A_MICRO_BATCH * ROW, batch(count * ROWS_OF_A_MICRO_BATCH)
        alone, staged = engine_of(apart, layers, budget), engine_of(pipeline, layers, budget)
        own = rows[list(range(rank, len(rows), 2))]
        seconds: dict[str, list[float]] = {"apart": [], "staged": []}
        idle: list[tuple[float, float]] = []
        for turn in range(turns + 1):
            pair = [update_s(alone, own)]
            with timed_passes() as passes:
                pair.append(update_s(staged, rows))
            assert len(passes) == 2 * count, (len(passes), count)
            everyone: list[Any] = [None, None]
            pipeline.dist.all_gather_object(everyone, [(t.kind, t.number, t.start, t.stop) for t in passes])
            if not turn:
                continue
            for name, x in zip(seconds, pair, strict=True):
                seconds[name].append(x)
            last = max(t[3] for one in everyone for t in one)
            first = min(t[2] for one in everyone for t in one)
            busy = sum(t.stop - t.start for t in passes)
            replay = replayed_idle([{(k, n): b - a for k, n, a, b in one} for one in everyone])[rank]
            idle.append((1 - busy / (last - first), replay))
        alone.optimizer_tensors()
        found[str(count)] = {
            **{name: statistics.median(x) for name, x in seconds.items()},
            "of_limit": statistics.median(
                a / b * (count + 1) / count for a, b in zip(seconds["apart"], seconds["staged"], strict=True)
            ),
            "idle": statistics.median(x for x, _ in idle),
            "replayed_idle": statistics.median(x for _, x in idle),
            "bytes": {k: [x, held_bytes(alone)[k]] for k, x in held_bytes(staged).items()},
        }
    answers.put((rank, found))
    apart.dist.barrier()
    apart.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (f"{directory}/meeting", options.micro_batches, options.layers, options.turns, answers)
        workers = [spawn.Process(target=work, args=(rank, *arguments)) for rank in range(2)]
        for worker in workers:
            worker.start()
        found = dict(answers.get(timeout=3600) for _ in workers)
        for worker in workers:
            worker.join()
    rows = [
        [
            f"two pipeline stages on two cores, {count} micro-batches",
            f"{found[0][count]['of_limit']:.2f} of the limit; idle "
            + ", ".join(
                f"{own[count]['idle']:.1%} (replay {own[count]['replayed_idle']:.1%})" for own in found.values()
            ),
            "bytes of a stage over the whole: "
            + ", ".join(f"{kind} {max(found[r][count]['bytes'][kind][0] for r in (0, 1)) / whole:.2f}x"
                        for kind, (_, whole) in found[0][count]["bytes"].items() if whole)
            + "; target: 0.90 of the limit, idle within 5 points, 0.55x",
        ]
        for count in found[0]
    ]  # fmt: skip
    print(json.dumps({"benchmark": "pipeline_speed", **vars(options), "found": found, "rows": rows}))


if __name__ == "__main__":
    main()
