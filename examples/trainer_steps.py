"""Trainer, one step at a time: save, load, continue with another reward.

    python examples/trainer_steps.py

GRPO teaches the built-in model, from random weights, to answer in digits, and then in even digits. Takes seconds on a
CPU and needs no network; writes to outputs/ and checkpoints/ in the working directory. For your own model use
model=NAME_OR_PATH, or pass a loaded Hugging Face model with its tokenizer, which is then trained in place.
"""

from __future__ import annotations

from verl.models.tiny import TinyModel
from verl.trainer.api.trainer import Trainer

ROWS = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
LENGTH = 4


def digits(prompts, responses):
    return [sum(c in "0123456789" for c in text) / LENGTH for text in responses]


def even_digits(prompts, responses):
    return [sum(c in "02468" for c in text) / LENGTH for text in responses]


def main() -> None:
    source = TinyModel(hidden_size=64, intermediate_size=256)
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    with Trainer(
        model=model,
        tokenizer=tokenizer,
        reward_model=digits,
        train_dataset=ROWS,
        algorithm="grpo",
        rollout_config={"max_new_tokens": LENGTH, "n": 8},
        checkpoint_config={"save_dir": "checkpoints/steps", "save_interval": None, "keep_last_n": 3},
        train_config={"lr": 3e-3, "prompts_per_step": 16, "total_steps": 40},
    ) as trainer:
        for _ in range(20):
            trainer.step()
        print(f"after {trainer.steps} steps: {trainer.metrics['reward/mean']:.2f} of the characters are digits")
        saved = trainer.save_checkpoint(tag=f"digits_step_{trainer.steps}")

        following = trainer.step()
        trainer.load_checkpoint(saved, mmap=True)
        print(
            f"loaded {saved.name}, step {trainer.steps}; the next step is the same again: {trainer.step() == following}"
        )

        trainer.reward_model = even_digits
        trainer.reset_reward_stats()
        trainer.step()
        print(
            f"another reward, the same policy: {trainer.metrics['reward/mean']:.2f} of the characters are even digits"
        )
        result = trainer.fit()
    print(f"{result.status} after {result.steps} steps: {result.last_metrics['reward/mean']:.2f} are")


if __name__ == "__main__":
    main()
