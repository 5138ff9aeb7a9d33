"""The smallest run that main_ppo.py makes, with a reward that depends on every response."""

from __future__ import annotations

from pathlib import Path


def small_run(model, directory: Path) -> list[str]:
    """Overrides; the reward lies in a file in `directory`."""
    rule = directory / "rate.py"
    rule.write_text("def variety(prompts, responses):\n    return [len(set(r)) for r in responses]\n")
    choices = ["actor=pretrained", f"actor.model.path={model.path}", "reward=function", f"reward.path={rule}:variety"]
    rates = ["actor.optimizer.lr=1e-3", "trainer.num_threads=1", "data.held_out=4", "trainer.eval_samples=0"]
    sizes = ["trainer.prompts_per_step=4", "trainer.group_size=2", "rollout.max_new_tokens=6"]
    return [*choices, *rates, *sizes]
