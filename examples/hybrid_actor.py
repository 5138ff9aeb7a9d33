"""A user-defined training loop with HybridActor: sample, score and train with one set of weights.

    python examples/hybrid_actor.py

REINFORCE with the mean of the batch as its baseline teaches the built-in model, from random weights, to answer in
digits. Takes seconds on a CPU and needs no network. For your own model use HybridActor.from_pretrained(NAME_OR_PATH).
"""

from __future__ import annotations

import torch

from verl.hybrid.actor import HybridActor
from verl.hybrid.benchmark import measure_switch_overhead
from verl.models.tiny import TinyModel

STEPS, PROMPTS, NEW_TOKENS = 30, 32, 6


def share_of_digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / NEW_TOKENS


def main() -> None:
    source = TinyModel(hidden_size=64, intermediate_size=256)
    actor = HybridActor(source.load_causal_lm("cpu"), source.load_tokenizer())
    optimizer = torch.optim.AdamW(actor.parameters(), lr=3e-3)
    prompts = actor.tokenizer([f"{number}+{number}=" for number in range(PROMPTS)], padding=True, return_tensors="pt")
    width = prompts["input_ids"].shape[1]

    for step in range(1, STEPS + 1):
        rows = actor.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, seed=step)
        texts = actor.tokenizer.batch_decode(rows[:, width:], skip_special_tokens=True)
        rewards = torch.tensor([share_of_digits(text) for text in texts])

        answered = (rows[:, width:] != actor.tokenizer.pad_token_id).long()
        mask = torch.cat([prompts["attention_mask"], answered], dim=1)
        logits = actor(input_ids=rows, attention_mask=mask).logits[:, width - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, rows[:, width:, None]).squeeze(-1)
        loss = -((rewards - rewards.mean())[:, None] * log_probs * answered).sum() / answered.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, STEPS):
            print(f"step {step}: {rewards.mean():.2f} of the characters are digits, such as {texts[0]!r}")

    cost = measure_switch_overhead(actor, mode="round_trip")
    print(f"generate, train and back: {cost['latency_ms']:.3f} ms, {cost['mem_increase_mb']:.1f} MiB more")


if __name__ == "__main__":
    main()
