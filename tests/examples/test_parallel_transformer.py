"""A hand-written transformer that divides itself over processes is trained, saved and loaded as any other model."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import refusals
import torch
from equivalence.test_sharding_chain import tensors_of
from refusals import refused
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, ppo_run

from verl.checkpoint.config import Checkpointing
from verl.component import BuildContext
from verl.models.lora import LoRA
from verl.models.own_module import TPRank
from verl.rollout.vllm.config import VLLMRollout

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # of the workers too

from parallel_transformer import ParallelTransformer  # noqa: E402  # type: ignore

MODEL = ParallelTransformer(dtype="float64")


def test_the_parts_of_all_processes_are_the_whole():
    whole = dict(MODEL.build_part(TPRank()).module.named_parameters())
    made = [MODEL.build_part(TPRank(rank, 2)) for rank in range(2)]
    num_divided = 0
    for name, x in whole.items():
        parts = [dict(one.module.named_parameters())[name] for one in made]
        dim = made[0].parts[name].dim
        num_divided += dim is not None
        assert torch.equal(parts[0] if dim is None else torch.cat(parts, dim), x), name
    assert num_divided == 2 * 6


def test_it_is_trained_saved_and_resumed_in_one_process(tmp_path):
    checkpoint = Checkpointing(save_dir=str(tmp_path / "checkpoints"), save_interval=1)

    def weights_after(directory, steps, **parts):
        run = ppo_run(MODEL, GRPO_ALGORITHM, group_size=3, total_steps=3, stop_after=steps)
        run = dataclasses.replace(run, checkpoint=checkpoint, **parts)
        with run.build(BuildContext(run_dir=tmp_path / directory)) as trainer:
            assert trainer.fit().steps == steps
        return tensors_of(tmp_path / f"checkpoints/global_step_{steps}")

    first = weights_after("one", 1)
    assert first["actor/layers.0.query.weight"].shape == (64, 64)
    resumed = weights_after("two", 2, resume="latest")
    checkpoint = dataclasses.replace(checkpoint, save_dir=str(tmp_path / "again"))
    with dataclasses.replace(
        ppo_run(MODEL, GRPO_ALGORITHM, group_size=3, total_steps=3, stop_after=2), checkpoint=checkpoint
    ).build(BuildContext(run_dir=tmp_path / "three")) as trainer:
        trainer.fit()
    straight = tensors_of(tmp_path / "again/global_step_2")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(x, resumed[name]) for name, x in straight.items())
    assert not torch.equal(straight["actor/layers.0.query.weight"], first["actor/layers.0.query.weight"])
    loaded = MODEL.at(str(tmp_path / "checkpoints/global_step_2/actor")).load_part("cpu", TPRank(1, 2))
    assert torch.equal(loaded.module.layers[0].out.weight, straight["actor/layers.0.out.weight"][:, 32:])


RUN = ppo_run(MODEL, GRPO_ALGORITHM)
VLLM = VLLMRollout(max_new_tokens=4)
test_what_needs_a_model_of_transformers_is_refused_by_name = refused(
    ("rollout", "VLLMRollout", lambda: dataclasses.replace(RUN, rollout=VLLM)),
    ("critic.model", "ParallelTransformer", lambda: dataclasses.replace(RUN, algorithm=PPO_ALGORITHM)),
    ("lora", refusals.ANY, lambda: dataclasses.replace(RUN.actor, lora=LoRA(rank=2))),
)


@pytest.mark.exhaustive
def test_the_example_trains_with_two_processes_and_goes_on_with_one(tmp_path):
    words = [sys.executable, str(EXAMPLES / "parallel_transformer.py")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [
        float(line.split("reward ")[1].split()[0]) for line in done.stdout.splitlines() if line.startswith("step ")
    ]
    assert "Resuming from" in done.stdout + done.stderr
    assert rewards[0] < 0.3 < 0.8 < rewards[-1]
