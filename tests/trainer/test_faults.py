"""Bad input is an error before training, with the path of the setting; what fails later ends the run in order."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from refusals import refusal
from trainer.runs import GRPO_ALGORITHM, JSONL, PPO_ALGORITHM, Prompts, ppo_run, read_lines
from transformers import AutoTokenizer

from verl import config
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import KLInReward, NoKL
from verl.component import BuildContext, component
from verl.data.files import PromptFiles
from verl.engines.optimizer import AdamW
from verl.engines.sharding import DDP, FSDP, HSDP, TP, NoSharding, Parallel
from verl.errors import ConfigError, RewardError
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.ops.cpu_matmul import active_library
from verl.replay.config import TieredReplay
from verl.rewards.base import RewardDescription
from verl.rewards.function import CallableReward, RewardFunction
from verl.rollout.hf import HFRollout
from verl.trainer.config import PPOSettings
from verl.trainer.setup import ProcessState
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.reference import Reference


def faults_of(model: Any, algorithm: Any = PPO_ALGORITHM, **parts: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ppo_run(model, algorithm, **parts)
    return caught.value.faults


def test_a_group_of_one_is_refused_where_responses_are_compared_with_siblings(model32):
    (fault,) = faults_of(model32, dataclasses.replace(GRPO_ALGORITHM, mini_batches=1), group_size=1)
    assert fault.startswith("trainer.group_size is 1: GRPO compares")
    assert "trainer.group_size >= 2" in fault
    ppo_run(model32, PPO_ALGORITHM, group_size=1)  # which is fine without groups


@pytest.mark.parametrize(("mini_batches", "fitting"), [(4, 3), (7, 6), (100, 6)])
def test_mini_batches_that_do_not_divide_are_refused_with_a_number_that_would(model32, mini_batches, fitting):
    algorithm = dataclasses.replace(PPO_ALGORITHM, mini_batches=mini_batches)
    (fault,) = faults_of(model32, algorithm, prompts_per_step=3, group_size=2)
    assert fault.startswith(f"algorithm.mini_batches is {mini_batches}: it does not divide the 6 responses")
    assert f"{fitting} would" in fault
    ppo_run(model32, dataclasses.replace(PPO_ALGORITHM, mini_batches=fitting), prompts_per_step=3, group_size=2)


def test_a_limit_that_makes_every_old_row_too_old_is_refused(model32):
    def reusing(limit: int | None) -> Algorithm:
        return dataclasses.replace(
            PPO_ALGORITHM, epochs=2, mini_batches=3, replay_fraction=0.5, replay_max_staleness=limit
        )

    (fault,) = faults_of(model32, reusing(5), replay=TieredReplay())
    assert fault.startswith("algorithm.replay_max_staleness is 5: a step makes 6 optimizer steps")
    (missing,) = faults_of(model32, reusing(6))
    assert missing.startswith("algorithm.replay_fraction is 0.5: there is no replay buffer")
    asynchronous = {"replay": TieredReplay(), "mode": "async", "max_staleness": 2}
    behaviour = dataclasses.replace(reusing(17), proximal="behaviour")
    (early,) = faults_of(model32, behaviour, **asynchronous)
    assert "its rows are drawn 2 syncs before (trainer.max_staleness), so even" in early
    ppo_run(model32, dataclasses.replace(behaviour, replay_max_staleness=18), **asynchronous)
    for limit in (6, None):
        ppo_run(model32, reusing(limit), replay=TieredReplay())
    ppo_run(model32, dataclasses.replace(reusing(5), replay_fraction=0.0))


def test_values_without_a_critic_are_refused(model32):
    (fault,) = faults_of(model32, critic=None)
    assert fault.startswith("critic is null: GAE needs values")
    assert "algorithm=grpo" in fault
    ppo_run(model32, GRPO_ALGORITHM, critic=None)


def test_kl_without_a_reference_is_refused(model32):
    (fault,) = faults_of(model32, reference=None)
    assert fault.startswith("reference is null: algorithm.kl needs one")
    for kl in (NoKL(), KLInReward(coef=0.0)):
        ppo_run(model32, dataclasses.replace(PPO_ALGORITHM, kl=kl), reference=None)


def test_texts_longer_than_the_context_of_the_models_are_refused(model32):
    (fault,) = faults_of(model32, data=Prompts(max_prompt_length=60), rollout=HFRollout(max_new_tokens=5))
    assert fault.startswith("data.max_prompt_length is 60: with rollout.max_new_tokens 5 that makes 65 tokens")
    assert "actor.model and critic.model hold 64" in fault
    ppo_run(model32, data=Prompts(max_prompt_length=59), rollout=HFRollout(max_new_tokens=5))


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"])
@pytest.mark.parametrize(("prompt", "response"), [(20, 50), (60, 20), (64, 1), (200, 300)])
def test_lengths_beyond_the_context_are_refused_with_numbers_to_paste(prompt, response, key, model32, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(json.dumps({"text_config": {key: 64}}))
    (fault,) = faults_of(
        Pretrained(path=str(tmp_path / "m")),
        GRPO_ALGORITHM,
        data=Prompts(max_prompt_length=prompt),
        rollout=HFRollout(max_new_tokens=response),
    )
    pasted = dict(re.findall(r"([\w.]+)=(\d+)", fault.partition(" Set ")[2]))
    prompt = int(pasted.get("data.max_prompt_length", prompt))
    response = int(pasted["rollout.max_new_tokens"])
    settings = {"data": Prompts(max_prompt_length=prompt), "rollout": HFRollout(max_new_tokens=response)}
    ppo_run(model32, GRPO_ALGORITHM, **settings)


def test_a_critic_that_is_never_built_is_asked_for_nothing(model32, tmp_path):
    shorter = tmp_path / "shorter"
    shutil.copytree(model32.path, shorter)
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    critic = Critic(model=Pretrained(path=str(shorter)), optimizer=AdamW(lr=1e-3))
    settings = {"critic": critic, "data": Prompts(max_prompt_length=20), "rollout": HFRollout(max_new_tokens=5)}
    (fault,) = faults_of(model32, PPO_ALGORITHM, **settings)
    assert "critic.model holds 16" in fault
    ppo_run(model32, GRPO_ALGORITHM, **settings)


def test_several_processes_without_a_sharding_are_refused(model32):
    (fault,) = faults_of(model32, n_gpus_per_node=2)
    assert fault.startswith("trainer.n_gpus_per_node is 2: sharding=none runs in one process")
    ppo_run(model32, n_gpus_per_node=2, sharding=DDP())


@component
class OfWholeModels(HFRollout):
    """An engine of a user's that knows nothing of stages."""

    supports: ClassVar[frozenset[str]] = HFRollout.supports - {"stages"}


def test_stages_that_a_model_or_a_rollout_does_not_have_are_refused(model32):
    """The model has two layers."""
    (fault,) = faults_of(model32, n_gpus_per_node=4, sharding=Parallel(pp=4))
    assert fault.startswith(
        "sharding.pp is 4: the model has 2 layers, and every stage needs at least one. The nearest layout"
    )
    assert fault.endswith("(layers of actor.model)")
    found = faults_of(model32, n_gpus_per_node=2, sharding=Parallel(pp=2), rollout=OfWholeModels())
    told = "rollout is a OfWholeModels: it takes no weights from an actor in 2 pipeline stages"
    assert any(fault.startswith(told) for fault in found)
    ppo_run(model32, n_gpus_per_node=2, sharding=Parallel(pp=2))


def test_processes_that_cannot_be_grouped_and_heads_that_cannot_be_divided_are_refused(model32):
    (fault,) = faults_of(model32, n_gpus_per_node=4, sharding=HSDP(replicas=3))
    assert fault.startswith("sharding.replicas is 3: it does not divide the 4 processes of trainer.n_gpus_per_node")
    (fault,) = faults_of(model32, n_gpus_per_node=4, sharding=TP())
    assert fault.startswith("sharding.tensor_parallel is 4: it must divide the model's 2 key-value heads and 4 heads.")
    assert fault.endswith("Set it to 1 or 2. (heads of actor.model)")
    ppo_run(model32, n_gpus_per_node=4, sharding=TP(tensor_parallel=2))


def test_a_role_whose_own_sharding_does_not_fit_is_refused_by_its_own_path(model32):
    critic = Critic(model=model32, optimizer=AdamW(lr=1e-3), sharding=TP())
    (fault,) = faults_of(model32, n_gpus_per_node=4, sharding=DDP(), critic=critic)
    assert fault.startswith("critic.sharding.tensor_parallel is 4: it must divide the model's 2 key-value heads")
    assert "(heads of critic.model)" in fault
    (fault,) = faults_of(model32, n_gpus_per_node=2, sharding=DDP(), reference=Reference(sharding=NoSharding()))
    assert fault.startswith("trainer.n_gpus_per_node is 2: reference.sharding=none runs in one process.")
    actor = Actor(model=model32, optimizer=AdamW(lr=1e-3), lora=LoRA(rank=2))
    (fault,) = faults_of(model32, n_gpus_per_node=2, sharding=DDP(), actor=actor, reference=Reference(sharding=FSDP()))
    assert fault.startswith("reference.sharding differs from that of the actor")
    ppo_run(model32, n_gpus_per_node=2, sharding=DDP(), actor=actor, reference=Reference())


@pytest.mark.parametrize("device", ["gpu", "cuda:x", ""])
def test_a_device_that_does_not_exist_anywhere_is_refused(model32, device):
    with refusal("device", "device"):
        ppo_run(model32, device=device)


def test_all_faults_are_told_at_once(model32):
    faults = faults_of(model32, critic=None, reference=None, n_gpus_per_node=2)
    assert [fault.split()[0] for fault in faults] == ["critic", "reference", "trainer.n_gpus_per_node"]


def test_more_prompts_in_a_step_than_in_the_data_are_refused(model32, tmp_path):
    with refusal("trainer.prompts_per_step"):
        ppo_run(model32, prompts_per_step=9).build(BuildContext(run_dir=tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(model32, tmp_path):
    with refusal("trainer.device"):
        ppo_run(model32, device="cuda").build(BuildContext(run_dir=tmp_path))


def test_a_model_directory_that_vanished_is_named_and_nothing_stays_changed(dir32, tmp_path):
    shutil.copytree(dir32, tmp_path / "model")
    run = ppo_run(Pretrained(path=str(tmp_path / "model")), strict_data_check=True, num_threads=1)
    shutil.rmtree(tmp_path / "model")
    threads = torch.get_num_threads()
    with pytest.raises((ConfigError, OSError), match=str(tmp_path / "model")):
        run.build(BuildContext(run_dir=tmp_path / "run"))
    assert not config.strict_data_check
    assert "VERL_STRICT_DATA_CHECK" not in os.environ
    assert torch.get_num_threads() == threads


@component
class FailsAtCall(RewardDescription):
    """A reward that goes wrong at one of its calls, in one of several ways."""

    way: str
    call: int

    def build(self, context: BuildContext) -> CallableReward:
        calls = []

        def my_reward(prompts, responses, **columns):
            calls.append(len(responses))
            if len(calls) < self.call:
                return [0.5] * len(responses)
            if self.way == "raises":
                raise KeyError("no such entry")
            good = [0.5] * (len(responses) - 1)
            return {"short": good, "nan": [*good, float("nan")], "none": None, "item": [*good, "1"]}[self.way]

        return RewardFunction.wrap(my_reward)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "found"),
    [("raises", "KeyError"), ("short", "5 items"), ("nan", "nan"), ("none", "None"), ("item", "of type str")],
)
def test_a_reward_that_goes_wrong_ends_the_run_and_keeps_what_was_written(model32, tmp_path, way, found):
    reward = FailsAtCall(way=way, call=3)
    run = ppo_run(model32, reward=reward, total_steps=4, eval_before=False, tracker=JSONL)
    with run.build(BuildContext(run_dir=tmp_path)) as trainer, pytest.raises(RewardError) as caught:
        trainer.fit()
    assert "my_reward()" in str(caught.value)
    assert found in str(caught.value)
    assert "test_faults.py" in str(caught.value)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert not (tmp_path / "actor").exists()
    trainer.close()  # again


def test_a_whole_run_passes_the_strict_check_which_is_off_again_afterwards(model32, tmp_path):
    run = ppo_run(model32, strict_data_check=True, total_steps=2, num_threads=1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        assert config.strict_data_check
        assert os.environ["VERL_STRICT_DATA_CHECK"] == "1"  # for workers
        result = trainer.fit()
    assert result.status == "finished"
    assert not config.strict_data_check
    assert "VERL_STRICT_DATA_CHECK" not in os.environ
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert Path(tmp_path / "actor" / "config.json").is_file()


def test_a_critic_that_reads_other_token_ids_is_refused(dir32, tmp_path):
    other = shutil.copytree(dir32, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    source = Pretrained(path=str(dir32))
    critic = Critic(model=Pretrained(path=str(other)), optimizer=AdamW(lr=1e-3))
    with refusal("critic.model"):
        ppo_run(source, critic=critic).build(BuildContext(run_dir=tmp_path / "run"))


def test_faults_of_the_data_that_show_when_it_is_read_are_told_by_their_path(model32, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1="}\n')
    run = ppo_run(model32, data=PromptFiles(train_files=(str(file),), max_prompt_length=16))
    with refusal("data.prompt_key"):
        run.build(BuildContext(run_dir=tmp_path / "run"))


def test_the_first_of_epochs_and_steps_ends_a_run():
    given = {(None, None): 7, (3, None): 21, (None, 50): 50, (3, 50): 21, (3, 5): 5}
    for (epochs, steps), expected in given.items():
        assert PPOSettings(total_epochs=epochs, total_steps=steps).num_steps(lambda epochs: 7 * epochs) == expected


def test_what_a_run_changes_in_its_process_is_put_back_when_the_last_one_ends():
    threads = torch.get_num_threads()
    library = active_library()
    first = ProcessState(PPOSettings(num_threads=1, cpu_matmul="onednn"))
    assert active_library() == "onednn"
    second = ProcessState(PPOSettings(num_threads=1, strict_data_check=True, cpu_matmul="mkl"))
    first.restore()
    first.restore()
    assert torch.are_deterministic_algorithms_enabled()
    assert config.strict_data_check
    second.restore()
    assert (torch.get_num_threads(), active_library()) == (threads, library)
    assert not config.strict_data_check
