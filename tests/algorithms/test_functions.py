"""A bare function is an advantage or a loss like a class: the same numbers, and faults that name file and function."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from refusals import refusal
from same_training import course, same_training, saved
from trainer.runs import GRPO_ALGORITHM, fit

from verl.algorithms.advantages import GRPO
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.functions import AdvantageFunction, FunctionFailed, LossFunction
from verl.algorithms.losses import PPOClip
from verl.component import as_plain
from verl.compose.compose import compose_root
from verl.compose.overrides import command_line
from verl.compose.validate import validate
from verl.engines.sharding import DDP
from verl.protocol import DataProto
from verl.trainer.state.training_identity import identity_of

PARTS = """
import torch

def advantage(batch, epsilon):
    mask, rewards = batch["response_mask"], batch["token_level_rewards"]
    scores, groups = (rewards * mask).sum(-1), batch["group_ids"]
    whole = torch.zeros_like(scores)
    for group in groups.unique():
        own = scores[groups == group]
        whole[groups == group] = (own - own.mean()) / (own.std(unbiased=True) + epsilon)
    return whole

def per_token(batch):
    values = batch["token_level_rewards"] + 1.0
    return values, 2 * values

def loss(log_probs, batch, clip=0.2):
    ratio, advantages = (log_probs - batch["old_log_probs"]).exp(), batch["advantages"]
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantages, clipped * advantages), {"ratio": ratio}

CALLS = []

def counting(log_probs, batch):
    CALLS.append(1)
    return log_probs * len(CALLS)

def detached(log_probs, batch):
    return -log_probs.detach() * batch["advantages"]


def scalar(log_probs, batch):
    return log_probs.sum()

def failing(log_probs, batch):
    return log_probs / batch["advantages"].nothing

def of_my_column(batch):
    return torch.tensor([float(x) for x in batch.non_tensor_batch["weight"]])

def in_place(log_probs, batch):
    batch["old_log_probs"].zero_()
    return -log_probs * batch.pop("advantages")

def same_name(log_probs, batch):
    return log_probs, {"loss": log_probs}

def centred_in_place(batch):
    rewards = batch["token_level_rewards"]
    rewards -= rewards.mean()
    return rewards
"""


@pytest.fixture(autouse=True)
def users_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(PARTS)
    return Path("my.py")


def function(name: str, **options) -> LossFunction:
    return LossFunction(path=f"my.py:{name}", **options)


def batch(rows: int = 4, tokens: int = 3) -> DataProto:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    mask[0, 2] = False
    names = ("token_level_rewards", "old_log_probs", "advantages", "log_probs")
    numbers = {name: torch.randn(rows, tokens, generator=generator) for name in names}
    numbers["token_level_rewards"] *= mask
    return DataProto.from_dict({**numbers, "response_mask": mask, "group_ids": torch.arange(rows) // 2})


@pytest.mark.parametrize("clip", [0.2, 0.05])
def test_a_loss_function_has_the_loss_and_the_gradient_of_the_class(clip):
    results = []
    for loss in (function("loss", kwargs={"clip": clip}), PPOClip(clip_low=clip, clip_high=clip)):
        x = dict(batch().batch)
        log_probs = x.pop("log_probs").requires_grad_()
        value, stats = loss(log_probs, x)
        value.sum().backward()
        results.append((value.detach(), log_probs.grad, stats["ratio"]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_an_advantage_function_gives_advantages_of_responses_or_tokens_and_returns():
    rows, mask = batch(), batch()["response_mask"]
    own = AdvantageFunction(path="my.py:advantage", kwargs={"epsilon": 1e-6})(rows)
    torch.testing.assert_close(dict(own.batch), dict(GRPO()(rows).batch))
    both = AdvantageFunction(path="my.py:per_token")(rows)
    assert torch.equal(both["advantages"], torch.where(mask, rows["token_level_rewards"] + 1, 0.0))
    assert torch.equal(both["returns"], 2 * both["advantages"])
    AdvantageFunction(path="my.py:centred_in_place")(rows)
    x = dict(batch().batch)
    function("in_place")(x["log_probs"], x)
    assert torch.equal(x["old_log_probs"], batch()["old_log_probs"])
    assert torch.equal(rows["token_level_rewards"], batch()["token_level_rewards"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, pytest.param({"sharding": DDP(), "n_gpus_per_node": 2, "num_threads": 2},
                                                      marks=pytest.mark.exhaustive)])  # fmt: skip
def test_a_run_with_a_function_is_the_run_with_the_class_and_goes_on_from_a_checkpoint(options, model32, tmp_path):
    clip = PPOClip(clip_low=0.2, clip_high=0.2)
    made = {}
    for name, loss in (("function", function("loss")), ("class", clip)):
        algorithm = dataclasses.replace(GRPO_ALGORITHM, policy_loss=loss)
        fit(course(model32, tmp_path / name, algorithm, **options), tmp_path / name / "run")
        made[name] = saved(tmp_path / name)
        for line in made[name].metrics.values():
            for key in ("actor/clip_fraction", "actor/approx_kl"):
                line.pop(key, None)
    assert made["function"].metrics == made["class"].metrics
    algorithm = dataclasses.replace(GRPO_ALGORITHM, policy_loss=function("loss"))
    point = tmp_path / "function/checkpoints/global_step_2"
    fit(course(model32, tmp_path / "again", algorithm, resume=point, **options), tmp_path / "again/run")
    whole, again = saved(tmp_path / "function"), saved(tmp_path / "again")
    same_training(again, whole, after=2)


def test_an_edited_function_is_another_training(users_file, model32, tmp_path):
    algorithm = dataclasses.replace(GRPO_ALGORITHM, policy_loss=function("loss"))
    fit(course(model32, tmp_path, algorithm, total_steps=2), tmp_path / "run")
    users_file.write_text(PARTS.replace("clip=0.2", "clip=0.3"))
    with refusal("algorithm.policy_loss.path", "resume"):
        fit(course(model32, tmp_path, algorithm, resume="latest"), tmp_path / "second")


def test_a_function_of_a_module_is_identified_by_its_content(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    config = {"algorithm": as_plain(Algorithm(advantage=GRPO(), policy_loss=LossFunction(path="my:loss")))}
    before = identity_of(config, None)["algorithm.policy_loss.path"]
    Path("my.py").write_text(PARTS + "# edited")
    assert before[1] == "loss"
    assert before != identity_of(config, None)["algorithm.policy_loss.path"]


def composed(*words: str):
    arguments, assigned = command_line("ppo", ["algorithm=grpo", "critic=none", *words])
    return compose_root("ppo", arguments), assigned.faults


def test_the_command_line_takes_a_path_in_place_of_a_component():
    config, faults = composed(
        "algorithm.policy_loss={path: my.py:loss, kwargs: {clip: 0.1}}",
        "algorithm.advantage={path: my.py:advantage, kwargs: {epsilon: 0.1}, needs_groups: true}",
    )
    algorithm = validate(config, faults).algorithm
    assert algorithm.policy_loss == function("loss", kwargs={"clip": 0.1})
    assert algorithm.needs_groups
    again = OmegaConf.create(as_plain(validate(config)))
    assert validate(again).algorithm == algorithm


@pytest.mark.first_rows(4)
@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("policy_loss={path: my.py:los}", ".path", "my.py:los"),
        ("policy_loss={path: your.py:loss}", ".path", "your.py:loss"),
        ("policy_loss={path: my.py:loss, kwargs: {clp: 1}}", ".kwargs.clp", "clip?"),
        ("policy_loss={path: my.py:loss, kwarg: {}}", ".kwarg", "algorithm.policy_loss.kwargs?"),
        ("policy_loss={path: my.py:per_token}", ".path", "log_probs"),
        ("policy_loss={path: my.py:counting}", "", "my.py:counting"),
        ("policy_loss={path: my.py:scalar}", ".path", "my.py:scalar"),
        ("policy_loss={path: my.py:detached}", ".path", "my.py:detached"),
        ("policy_loss={path: my.py:failing}", ".path", "AttributeError"),
        ("policy_loss={path: my.py:same_name}", ".path", "my.py:same_name"),
        ("advantage={path: my.py:advantage}", ".path", "epsilon"),
    ],
)
def test_a_fault_names_file_and_function_before_anything_loads(part, key, value):
    config, found = composed(f"algorithm.{part}")
    with refusal(f"algorithm.{part.partition('=')[0]}{key}", value=value):
        validate(config, found)


def test_a_function_that_reads_columns_of_the_data_is_taken_and_fails_by_name_without_them():
    estimator = AdvantageFunction(path="my.py:of_my_column")
    Algorithm(advantage=estimator, policy_loss=PPOClip())
    rows = batch().union(DataProto.from_dict(non_tensors={"weight": ["1", "2", "3", "4"]}))
    assert estimator(rows)["advantages"][:, 0].tolist() == [1, 2, 3, 4]
    with refusal("algorithm.advantage.path", "my.py:of_my_column", "weight", kind=FunctionFailed):
        estimator(batch())


def test_kwargs_are_json_in_the_saved_configuration():
    plain = as_plain(function("loss", kwargs={"clip": 0.1}))
    assert json.loads(json.dumps(plain))["kwargs"] == {"clip": 0.1}
