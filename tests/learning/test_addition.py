"""Every algorithm raises the reward of the built-in task, composed as main_ppo.py composes it.

Sums of two numbers, from the weights that supervised fine-tuning leaves; 32 of the problems, so that seconds show it.
"""

import fcntl
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.schema import group_options
from verl.compose.validate import validate
from verl.compose.warm_start import resolve_warm_starts
from verl.ops.sampling import EVALUATION
from verl.rollout.base import GenerationRequest
from verl.trainer.ppo import PPOTrainer
from verl.trainer.ppo_config import PPORun

pytestmark = pytest.mark.slow

PROBLEMS = 32
SETTINGS = [
    f"data.train_size={PROBLEMS}", f"trainer.prompts_per_step={PROBLEMS}", "trainer.group_size=4",
    "trainer.total_steps=32", "trainer.num_threads=1", "trainer.device=cpu", "trainer.eval_before=false",
    "trainer.eval_samples=0", "trainer.save_final=false", "tracker=none",
]  # fmt: skip


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the warm start, for this test session; the processes of a parallel one share it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with open(shared / "warm_starts.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first makes it, the others wait and find it
        started(["algorithm=ppo"], shared / "cache")
    return shared / "cache"


def started(overrides: list[str], cache: Path) -> PPORun:
    """The description of a run whose weights are there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_CACHE", str(cache))
        run = validate(compose_root("ppo", [*overrides, *SETTINGS]))
        return resolve_warm_starts(run, Console(file=io.StringIO()))


def drawn_reward(trainer: PPOTrainer) -> float:
    """Mean reward of 16 responses drawn to each problem of the training set."""
    problems = trainer.train_data.collate(range(PROBLEMS))
    rows = trainer.sampling.generate(problems, GenerationRequest(0, num_samples=16, stream=EVALUATION))
    return float(trainer.reward.score_tokens(rows)["score"].astype(float).mean())


@pytest.mark.learning
@pytest.mark.exhaustive  # test_learning.py has PPO learn in `make test`, test_wheel.py addition
@pytest.mark.parametrize("name", [name for name in group_options()["algorithm"] if name != "distill"])  # has a teacher
def test_an_algorithm_raises_the_reward_of_addition(name, cache, tmp_path):
    with started([f"algorithm={name}"], cache).build(BuildContext(run_dir=tmp_path)) as trainer:
        before = drawn_reward(trainer)
        trainer.fit()
        after = drawn_reward(trainer)
    assert 0.3 < before < 0.6
    assert after > before + 0.15  # means of 512 rewards, each sure to about 0.02
