"""DataPipeline and RLTrainer: a run defined by its parts.

    python examples/pipeline.py

Two rewards, summed by weight, teach the built-in model, from random weights, to answer with digits that do not repeat.
Takes seconds on a CPU and needs no network. For your own models use their names or paths.
"""

from __future__ import annotations

from verl.models.tiny import TinyModel
from verl.trainer.api.pipeline import DataPipeline, RLTrainer

LENGTH = 4


def digits(prompts, responses):
    return [sum(c.isdigit() for c in text) / LENGTH for text in responses]


def variety(prompts, responses):
    return [len(set(text)) / LENGTH for text in responses]


def main() -> None:
    pipeline = DataPipeline(
        actors=[TinyModel(hidden_size=64, intermediate_size=256)],
        reward_models=[digits, {"reward": variety, "weight": 0.5}],
        data=[{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)],
        rollout_config={"max_new_tokens": LENGTH, "n": 8},
        train_config={"lr": 3e-3, "prompts_per_step": 16, "total_steps": 40},
    )
    result = RLTrainer(pipeline=pipeline).run()
    digits_mean, variety_mean = (result.last_metrics[f"reward/{name}"] for name in ("digits", "variety"))
    print(f"{result.status} after {result.steps} steps: digits {digits_mean:.2f}, variety {variety_mean:.2f}")


if __name__ == "__main__":
    main()
