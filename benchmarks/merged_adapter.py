"""How much of a LoRA update reaches an engine that gets it merged in bfloat16.

    python benchmarks/merged_adapter.py [--lr 2e-5]

SmolLM2-135M, with bfloat16 weights, trains an adapter of rank 16 on one sentence. After some updates four other texts
are scored in float32 by the trained model, by the model before training, and by the trained one, merged and rounded to
bfloat16. The differences are means over tokens, in nats; `lost` is that of merged and trained over that of trained and
base: at 100% the engine samples from the base model.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from verl.models.gguf import hub_or_package
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained

TRAINED = "The quick brown fox jumps over the lazy dog, and then it rests in the shade of the old oak tree."
SCORED = (
    "Give me the JSON object with name Tom and age 7.",
    "Write a sentence of fifty characters about the sea.",
    "The largest of 3, 17 and 12 is 17.",
    "Once upon a time there was a small dog that lived in a village near the river.",
)
UPDATES = (1, 5, 10, 20, 40)


@torch.no_grad()
def rounded(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16().float())
    return model


@torch.no_grad()
def log_probs(model: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """Log-probs of all tokens but the first of each row."""
    of_rows = [model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0] for row in rows]
    return torch.cat(of_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=2e-5)
    lr = parser.parse_args().lr
    source = Pretrained(path=hub_or_package("HuggingFaceTB/SmolLM2-135M-Instruct"))
    tokenizer, base = source.load_tokenizer(), rounded(source.load_causal_lm("cpu"))
    rows = [tokenizer(text, return_tensors="pt").input_ids for text in SCORED]
    trained_on, before = tokenizer(TRAINED, return_tensors="pt").input_ids, log_probs(base, rows)
    torch.manual_seed(0)
    model = LoRA(rank=16, alpha=32).apply(base, causal_lm=True)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=lr)
    print(f"lr {lr:g}\nupdates  trained - base  merged - trained  lost")
    for update in range(1, UPDATES[-1] + 1):
        model(trained_on, labels=trained_on).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if update in UPDATES:
            now, merged = log_probs(model, rows), log_probs(rounded(copy.deepcopy(model).merge_and_unload()), rows)
            changed, lost = (now - before).abs().mean().item(), (merged - now).abs().mean().item()
            print(f"{update:7}  {changed:14.5f}  {lost:16.5f}  {lost / changed:.0%}", flush=True)


if __name__ == "__main__":
    main()
