"""What the proof of a sync to vLLM costs, beside one copy of the weights and beside a GRPO step of the same model.

    python benchmarks/sync_proof.py               some minutes; --small for a look

Prints a JSON line after each model, the last one with all: seconds, medians with the quartiles, of each part of a proof
and of the whole, all parts taking turns. The step is our trainer's with `rollout=hf`, without the proof.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _workload as work
import grpo_step
import torch
from _progress import Progress

from verl.models.hf_state_dict import hf_state_dict
from verl.models.pretrained import Pretrained
from verl.rollout.model_log_probs import trainer_log_probs
from verl.rollout.proof import SyncVerifier, probe_rows
from verl.rollout.vllm.server.verification import answer_request

SHAPES = {"embedded": (128, 2), "small": (256, 4), "large": (768, 11)}  # hidden, layers
CONTEXT = 256
TARGET = 0.02  # of a step


class Steps:
    """Stands in for the conversation of `grpo_step`: one step to warm up, then those that are measured."""

    def __init__(self, wanted: int):
        self.wanted, self.seconds = wanted + 1, []

    def tell(self, **facts: float) -> None:
        if "step_s" in facts:
            self.seconds.append(facts["step_s"])

    def wait(self) -> bool:
        return len(self.seconds) < self.wanted


def step_seconds(directory: Path, options: argparse.Namespace) -> list[float]:
    """Of GRPO steps."""
    steps = Steps(options.steps)
    settings = {**vars(options), "model": str(directory), "lengths": "fixed", "bf16": False, "engine": "hf"}
    grpo_step.verl_side(argparse.Namespace(**settings), steps)  # type: ignore[arg-type]
    return steps.seconds[1:]


def proof_seconds(directory: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Of each part of a proof, of all of it, and of one copy of the weights."""
    from vllm import LLM

    model = Pretrained(path=str(directory)).load_causal_lm("cpu")
    llm = LLM(
        str(directory),
        dtype="float32",
        enforce_eager=True,
        worker_extension_cls="verl.rollout.vllm.server.worker_extension.WorkerExtension",
        max_model_len=CONTEXT,
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_num_batched_tokens=CONTEXT,
        kv_cache_memory_bytes=64 << 20,
    )
    torch.set_num_threads(options.threads)
    rows, log_probs = probe_rows(len(work.CHARACTERS), CONTEXT), partial(trainer_log_probs, model)
    prover = SyncVerifier(model, torch.float32, rows, log_probs)
    tensors = hf_state_dict(model).tensors
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    seconds: dict[str, list[float]] = {"copy": [], "marks": [], "log_probs": [], "engine": [], "proof": []}

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    def marks() -> None:
        for name, tensor in tensors.items():
            prover.add_fingerprint(name, tensor)

    for _ in range(options.repeats + 2):
        question = prover.question()
        took = {name: timed(part) for name, part in {"copy": copy, "marks": marks}.items()}
        took["log_probs"] = timed(lambda: trainer_log_probs(model, prover.rows))
        start = time.perf_counter()
        answered = answer_request(llm, question)
        took["engine"] = time.perf_counter() - start
        took["proof"] = prover.verify(answered)["sync/proof_s"]
        for name, s in took.items():
            seconds[name].append(s)
    return {name: found[2:] for name, found in seconds.items()}


def timed(part: Callable[[], Any]) -> float:
    start = time.perf_counter()
    part()
    return time.perf_counter() - start


def measure(options: argparse.Namespace, hidden: int, layers: int) -> dict[str, Any]:
    """One model."""
    with tempfile.TemporaryDirectory() as directory:
        parameters = work.write_model(Path(directory), hidden, layers)
        steps = step_seconds(Path(directory), options)
        parts = proof_seconds(Path(directory), options)
    step = work.spread(steps, 4)
    return {
        "parameters": parameters,
        "step_s": step,
        **{f"{name}_s": work.spread(found, 5) for name, found in parts.items()},
        "of_step": work.spread([s / step[0] for s in parts["proof"]], 4),
        "of_copy": work.spread([s / c for s, c in zip(parts["proof"], parts["copy"], strict=True)], 2),
        "target": TARGET,
    }


def table_row(case: dict[str, Any]) -> list[str]:
    return [
        f"proof of a sync to vLLM, {case['parameters'] / 1e6:.1f}M parameters, share of a GRPO step",
        f"{case['of_step'][0]:.2%} ({1e3 * case['proof_s'][0]:.1f} ms)",
        f"a step of {case['step_s'][0]:.2f} s; {case['of_copy'][0]} times one copy of the weights; target {TARGET:.0%}",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one tiny model, few repeats: to see that it works")
    parser.add_argument("--prompts", type=int, default=16, help="different prompts of a step (default 16)")
    parser.add_argument("--prompt-length", type=int, default=16, help="tokens of each (default 16)")
    parser.add_argument("--samples", type=int, default=8, help="responses to each (default 8)")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response (default 64)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps (default 3)")
    parser.add_argument("--repeats", type=int, default=20, help="measured proofs (default 20)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    parser.add_argument("--micro-batch-tokens", type=int, default=1280, help="tokens of a micro-batch (default 1280)")
    options = parser.parse_args()
    shapes = SHAPES
    if options.small:
        shapes = {"small": (128, 2)}
        options.prompts, options.samples, options.response, options.steps, options.repeats = 2, 2, 8, 2, 3
    torch.set_num_threads(options.threads)
    progress = Progress("sync_proof", vars(options), 0)
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        progress.say(f"{name}: steps, then proofs")
        found[name] = measure(options, *shape)
        progress.publish(found, [table_row(case) for case in found.values()], is_complete=len(found) == len(shapes))
    os._exit(0)  # vLLM's own shutdown takes seconds


if __name__ == "__main__":
    main()
