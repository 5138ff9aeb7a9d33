"""Peak memory of the policy loss over a large vocabulary: logits in chunks, against all of them at once.

    python benchmarks/loss_memory.py --vocabulary 150000 --tokens 2048

Prints one JSON line. Each way runs in a process of its own, forward and backward, and gives how far its resident
memory rose above what it was before the loss. Both ways take turns; medians with the quartiles as spread.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def rise_mib(way: str, vocabulary: int, tokens: int) -> float:
    """MiB by which the loss raised this process's peak of resident memory."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from verl.engines.chunked_logprobs import token_log_probs
    from verl.model_paths.micro_batch import MicroBatch
    from verl.models.heads import LMHead
    from verl.ops.logprobs import entropy_of, log_probs_of, response_positions

    rows, length = 16, tokens // 16
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # counted before, in both ways
    ids = torch.randint(0, vocabulary, (rows, length + 1))
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(length + 1).expand_as(ids),
    }
    responses = ids[:, 1:].contiguous()
    micro = MicroBatch(
        torch.arange(rows),
        inputs | {"responses": responses, "response_mask": torch.ones_like(responses, dtype=torch.bool)},
    )
    head = LMHead(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if way == "parts":
        scores = token_log_probs(model, head, micro, entropy=True)
        loss = scores.log_probs.sum() + scores.entropies.sum()
    else:
        logits = response_positions(model(**inputs).logits, length)
        loss = log_probs_of(logits, responses).sum() + entropy_of(logits).sum()
    loss.backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", choices=["parts", "plain"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(rise_mib(options.way, options.vocabulary, options.tokens))
        return
    rises: dict[str, list[float]] = {"parts": [], "plain": []}
    for _ in range(options.rounds):
        for way, found in rises.items():
            command = [
                sys.executable,
                __file__,
                "--way",
                way,
                *map(str, ("--vocabulary", options.vocabulary, "--tokens", options.tokens)),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(float(done.stdout.splitlines()[-1]))
    quartiles = {way: statistics.quantiles(found, n=4) for way, found in rises.items()}
    (low, parts, high), plain = quartiles["parts"], quartiles["plain"][1]
    work = f"{options.tokens} tokens, vocabulary {options.vocabulary}"
    rows = [
        [
            f"peak memory of log-probs and entropy, forward and backward, {work}",
            f"{parts:.0f} [{low:.0f}, {high:.0f}] MiB",
            f"{parts / plain:.2f}x of all logits at once ({plain:.0f} MiB); target: at most 0.3x",
        ]
    ]
    print(json.dumps({"benchmark": "loss_memory", **vars(options), "quartiles_mib": quartiles, "rows": rows}))


if __name__ == "__main__":
    main()
