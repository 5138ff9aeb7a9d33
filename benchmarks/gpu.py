"""Tests and measurements on GPUs in one command: `make gpu`. Writes benchmarks/results/gpu.json.

    python benchmarks/gpu.py            tests of tests/gpu, then the measurements below
    python benchmarks/gpu.py --dry      the measurements alone, small and on a CPU, printed: that they run

Measured: tokens of a training step per second, the share of sampling in a decode step, how long an asynchronous save
holds training up, and the memory of a step beside the plan. Without a GPU nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
RESULT = HERE / "results" / "gpu.json"
TESTS_LIMIT_S = 420.0


class Outcomes:
    """A pytest plugin: what became of each test, and why one was skipped."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._end = time.monotonic() + TESTS_LIMIT_S

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            told = {"outcome": report.outcome, "seconds": round(report.duration, 2), **dict(report.user_properties)}
            if report.skipped:
                told["why"] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
            elif report.failed:
                told["why"] = str(report.longrepr)[-2000:]
            self.found[report.nodeid] = told

    def pytest_runtest_setup(self, item: Any) -> None:
        import pytest

        if time.monotonic() > self._end:
            pytest.skip(f"the tests before it took more than {TESTS_LIMIT_S:g} s")


def run_tests() -> dict[str, dict[str, Any]]:
    """The outcome of each test of tests/gpu."""
    import pytest

    outcomes = Outcomes()
    pytest.main([str(ROOT / "tests" / "gpu"), "-q", "-p", "no:cacheprovider"], plugins=[outcomes])
    return outcomes.found


def settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(work: Any, device: str, repeats: int) -> float:
    """Seconds of one of several repetitions, after one that warms up."""
    work()
    settle(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    settle(device)
    return (time.perf_counter() - start) / repeats


def training(device: str, small: bool) -> dict[str, float]:
    """An update of a model in bfloat16 over float32 weights, rows packed."""
    from roles import start_actor, with_experience

    from verl.models.tiny import TinyModel
    from verl.protocol import DataProto
    from verl.rollout.hf import HFRollout

    sizes = (64, 128, 2) if small else (1024, 4096, 16)
    model = TinyModel(hidden_size=sizes[0], intermediate_size=sizes[1], num_layers=sizes[2])
    length, rows = (16, 4) if small else (512, 64)
    actor = start_actor(model, HFRollout(max_new_tokens=length), device=device, autocast="bfloat16")
    batch = DataProto.from_dict(made_rows(rows, length, vocabulary=16))
    batch = with_experience(batch, actor)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(lambda: actor.update(batch), device, 1 if small else 5)
    tokens = int(batch["attention_mask"].sum())
    found = {"tokens_per_s": tokens / seconds, "seconds": seconds, "parameters": float(actor.model.num_parameters())}
    if device.startswith("cuda"):
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def made_rows(rows: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Rows of prompts and responses of one length; half of the rows have two responses to one prompt."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, vocabulary, (rows, length), generator=generator)
    prompts[1::2] = prompts[::2]
    responses = torch.randint(4, vocabulary, (rows, length), generator=generator)
    ids = torch.cat([prompts, responses], dim=1)
    ones = torch.ones(rows, length, dtype=torch.bool)
    return {
        "prompts": prompts,
        "prompt_mask": ones,
        "responses": responses,
        "response_mask": ones.clone(),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(2 * length).expand(rows, -1).clone(),
        "rollout_log_probs": torch.zeros(rows, length),
        "prompt_ids": torch.arange(rows) // 2,
        "sample_ids": torch.arange(rows) % 2,
        "group_ids": torch.arange(rows) // 2,
    }


def sampling(device: str, small: bool) -> dict[str, float]:
    """Drawing a token for each of 256 rows from 128,256, beside the products of a decode step of an 8B model."""
    from verl.rollout.base import GenerationRequest
    from verl.rollout.token_sampler import TokenSampler

    rows, vocabulary, width, layers = (4, 1000, 64, 2) if small else (256, 128_256, 4096, 32)
    sampler = TokenSampler(GenerationRequest(0), 0, (0,))
    logits = torch.randn(rows, vocabulary, device=device)
    noise = torch.rand(rows, dtype=torch.float64, device=device)

    def draw() -> None:
        sampler.log_probs(logits, sampler.pick(logits, noise, 1))

    weight = torch.randn(width, 14 * width, device=device, dtype=torch.bfloat16)  # as many numbers as a layer of 8B has
    states = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    drawing = timed(draw, device, 2 if small else 50)
    products = timed(lambda: states @ weight, device, 2 if small else 50) * layers
    return {"seconds": drawing, "share_of_decode_step": drawing / (drawing + products)}


def saving(device: str, small: bool) -> dict[str, float]:
    """How long an asynchronous save holds the trainer up."""
    from checkpoint.requests import request

    from verl.checkpoint.commit.store import CheckpointStore
    from verl.checkpoint.save.async_writer import CheckpointWriter

    mib = 4 if small else 4096
    tensors = {f"weight_{i}": torch.randn(mib * 2**20 // 4 // 8, device=device) for i in range(8)}
    with tempfile.TemporaryDirectory() as folder, CheckpointWriter(CheckpointStore(Path(folder))) as writer:
        writer.save(request(1, tensors))
        writer.drain()
        settle(device)
        start = time.perf_counter()
        writer.save(request(2, tensors))
        held = time.perf_counter() - start
        writer.wait_copied()
        copied = time.perf_counter() - start
        writer.drain()
    return {"mib": float(mib), "held_s": held, "copied_s": copied}


MEASURED = {"training": training, "sampling": sampling, "saving": saving}


def measure(device: str, small: bool) -> dict[str, Any]:
    """What each measurement found, or why it could not be made."""
    found: dict[str, Any] = {}
    for name, work in MEASURED.items():
        try:
            found[name] = work(device, small)
        except Exception as error:  # noqa: BLE001 - the others are worth having
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    return found


def hardware() -> dict[str, Any]:
    """What the numbers were measured on."""
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "device": properties[0].name,
        "count": len(properties),
        "memory_gib": round(properties[0].total_memory / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="measure on a CPU, small, and print it")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.dry:
        print(json.dumps(measure("cpu", small=True)))
        return 0
    if not torch.cuda.is_available():
        print("make gpu needs a CUDA device, and torch finds none here: nothing was run, nothing was written.")
        return 2
    tests = run_tests()
    result = {"hardware": hardware(), "tests": tests, "measured": measure("cuda:0", small=False)}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    counts = {kind: sum(told["outcome"] == kind for told in tests.values()) for kind in ("passed", "failed", "skipped")}
    print(json.dumps({"hardware": result["hardware"], **counts, "measured": result["measured"]}))
    print(f"written to {options.out}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
