"""The smallest run that main_ppo.py makes, with a reward that depends on every response."""

from pathlib import Path

RULE = """
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")


def variety(prompts, responses):
    while HOLD.exists():
        time.sleep(0.01)
    return [len(set(r)) for r in responses]
"""


def small_run(model, directory: Path) -> list[str]:
    """Overrides; the reward lies in a file in `directory`, and waits while there is a file `hold` beside it."""
    rule = directory / "rate.py"
    rule.write_text(RULE)
    choices = ["actor=pretrained", f"actor.model.path={model.path}", "reward=function", f"reward.path={rule}:variety"]
    rates = ["actor.optimizer.lr=1e-3", "trainer.num_threads=1", "data.held_out=4", "trainer.eval_samples=0"]
    sizes = ["trainer.prompts_per_step=4", "trainer.group_size=2", "rollout.max_new_tokens=6"]
    return [*choices, *rates, *sizes]


def hold_once(there: Path, directory: Path) -> Path:
    """Let the run of a directory wait once something is there, and not before; until what is returned is removed."""
    hold = directory / "hold"
    hold.symlink_to(there)
    return hold
