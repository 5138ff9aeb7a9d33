"""Peak of allocated tensors in distillation with top_k, against logits of all tokens at once.

    python benchmarks/distill_memory.py --vocabulary 150000 --tokens 256 512 1024

Prints one JSON line. Counted are the storages of all tensors that operators return, forward and backward, beside those
that are there before: parameters, their gradients and the batch. Memory within an operator is not counted. The numbers
do not depend on the machine, so one measurement is enough.
"""

from __future__ import annotations

import argparse
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROWS, TOP_K = 16, 64


class AllocatedBytes(TorchDispatchMode):
    """Counts bytes of live storages that operators have returned.

    Attributes:
        peak: the most bytes at once.
        largest: bytes of the largest storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def peaks(vocabulary: int, tokens: int) -> dict[str, dict[str, int]]:
    """Peak and largest storage in bytes: of the teacher's pass, of the policy's update, and of both with all logits."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from verl.algorithms.distillation import Distillation
    from verl.engines.chunked_logprobs import token_log_probs
    from verl.model_paths.micro_batch import MicroBatch
    from verl.models.heads import LMHead
    from verl.ops.logprobs import response_positions

    torch.manual_seed(0)
    length = tokens // ROWS
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    teacher, policy = Qwen2ForCausalLM(config).requires_grad_(False), Qwen2ForCausalLM(config)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(0, vocabulary, (ROWS, length + 1))
    positions = torch.arange(length + 1).expand_as(ids)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    responses = ids[:, 1:].contiguous()
    fields = inputs | {"responses": responses, "response_mask": torch.ones_like(responses, dtype=torch.bool)}
    found = {}
    with AllocatedBytes() as counted, torch.no_grad():
        scores = token_log_probs(teacher, LMHead(teacher), MicroBatch(torch.arange(ROWS), fields), top_k=TOP_K)
    found["teacher"] = counted
    assert scores.candidates is not None
    assert scores.candidate_log_probs is not None
    fields |= {"ref_candidates": scores.candidates, "ref_candidate_log_probs": scores.candidate_log_probs}
    with AllocatedBytes() as counted:
        micro = MicroBatch(torch.arange(ROWS), fields)
        own = token_log_probs(policy, LMHead(policy), micro, candidates="ref_candidates")
        assert own.candidate_log_probs is not None
        distill = Distillation(top_k=TOP_K)
        distill.mixed_loss(-own.log_probs, own.candidate_log_probs, fields)[0].sum().backward()
    found["update"] = counted
    with AllocatedBytes() as counted:
        with torch.no_grad():
            theirs = response_positions(teacher(**inputs).logits, length).log_softmax(dim=-1)
        ours = response_positions(policy(**inputs).logits, length).log_softmax(dim=-1)
        (ours.exp() * (ours - theirs)).sum().backward()
    found["all logits"] = counted
    return {way: {"peak": counted.peak, "largest": counted.largest} for way, counted in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024])
    options = parser.parse_args()
    rows, sizes = [], {}
    for tokens in options.tokens:
        sizes[tokens] = found = peaks(options.vocabulary, tokens)
        mib = {way: value["peak"] / 2**20 for way, value in found.items()}
        logits = 4 * tokens * options.vocabulary
        rows.append(
            [
                f"distillation, top_k={TOP_K}, {tokens} tokens, vocabulary {options.vocabulary}: peak of the update",
                f"{mib['update']:.0f} MiB, largest tensor {found['update']['largest'] / logits:.2f} of all logits",
                f"{mib['update'] / mib['all logits']:.2f}x of all logits at once ({mib['all logits']:.0f} MiB); "
                f"the teacher's pass {mib['teacher']:.0f} MiB",
            ]
        )
    print(json.dumps({"benchmark": "distill_memory", **vars(options), "bytes": sizes, "rows": rows}))


if __name__ == "__main__":
    main()
