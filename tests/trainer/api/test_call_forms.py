"""Every form in which a script may hand over its parts runs as it is written."""

from __future__ import annotations

import pytest
import torch
from refusals import refusal, refused

from verl.checkpoint.config import Checkpointing
from verl.checkpoint.remote.transfer import tier_of
from verl.compose.compose import compose_root
from verl.compose.schema import conf_dir
from verl.compose.validate import validate
from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.rewards.function import CallableReward, RewardFunction
from verl.rewards.rules import ExactMatch
from verl.rewards.weighted_sum import SumOfRewards
from verl.trainer.api.trainer import Trainer
from verl.trainer.local_trainer import LocalPPOTrainer

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(2)]
QUIET = ["tracker=none", "trainer.save_final=false", "trainer.num_threads=1", "trainer.eval_before=false"]
SMALL = ["trainer.prompts_per_step=3", "trainer.total_steps=1", "trainer.eval_samples=0", "rollout.max_new_tokens=4"]


def r(prompts, responses):
    return [len(set(text)) / 9 for text in responses]


# Lengths


@pytest.mark.parametrize(
    ("rollout", "data", "lengths"),
    [
        pytest.param({"max_length": 40}, {}, (20, 20), marks=pytest.mark.exhaustive),
        pytest.param({"max_length": 40}, {"max_prompt_length": 10}, (10, 30), marks=pytest.mark.exhaustive),
        ({"max_length": 40, "max_new_tokens": 4}, {}, (36, 4)),
        ({"max_length": 512}, {}, (32, 32)),  # the model holds 64
    ],
)
def test_a_length_of_prompt_and_response_together_is_divided_between_them(rollout, data, lengths, dir32):
    settings = {"train_config": {"total_steps": 1}, "overrides": QUIET, "data_config": data}
    with Trainer(dir32, reward_model=r, train_dataset=ROWS, rollout_config=rollout, **settings) as made:
        assert (made.run.data.max_prompt_length, made.run.rollout.max_new_tokens) == lengths  # type: ignore


def divided(data_config, **rollout):
    given = {"reward_model": r, "train_dataset": ROWS, "rollout_config": rollout, "data_config": data_config}
    return lambda dir32: Trainer(dir32, **given)


test_a_length_that_cannot_be_divided_is_refused = refused(
    ("rollout_config.max_length", "long", divided({}, max_length="long")),
    ("rollout_config.max_length", 8, divided({"max_prompt_length": 8}, max_length=8)),
    ("rollout_config.max_length", 8, divided({}, max_length=8, max_new_tokens=9)),
    ("rollout_config.max_length", 8, divided({"max_prompt_length": 6}, max_length=8, max_new_tokens=2)),
)


# Devices


# Object storage


def test_a_prefix_may_end_in_a_slash_and_the_endpoint_may_be_the_environment_s(monkeypatch):
    table = {"type": "oss", "bucket": "models", "prefix": "verl-cold/", "upload_interval": 3600}
    monkeypatch.delenv("OSS_ENDPOINT", raising=False)
    with refusal("cold_storage.endpoint_url"):
        Checkpointing(cold_storage=table)
    with refusal("cold_storage.bucket", value=None):
        Checkpointing(cold_storage={"type": "s3"})
    for name in ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("OSS_ENDPOINT", "http://localhost:1")
    tier = tier_of(Checkpointing(cold_storage=table), None, "p", "e")
    assert tier is not None
    assert tier.address == "oss://models/verl-cold/checkpoints/p/e"
    assert (tier.rules.upload_interval, tier.rules.upload_interval_s) == (1, 3600)
    assert tier_of(Checkpointing(cold_storage={**table, "upload_every": 5}), None, "p", "e").rules.upload_interval == 5  # type: ignore
    for wrong in (0, -1, "soon", float("inf"), True):
        with refusal("cold_storage.upload_interval"):
            Checkpointing(cold_storage={**table, "upload_interval": wrong})
    tier.storage.backend()


# Values without default


def local(*overrides):
    return lambda: LocalPPOTrainer(None, ROWS, overrides=overrides)


test_a_value_without_default_and_a_group_without_option_are_told_with_what_to_give = refused(
    ("reward.model.path", "./my_model", local("use_rm=true")),
    ("replay", 4, local("replay.buffer_warmup_steps=4")),
    ("storage", "models", local("storage.bucket=models")),
)


OPEN = [
    (group, option)
    for group in ("actor", "critic", "data", "environment", "reward", "rollout", "sandbox")
    for option in sorted(path.stem for path in (conf_dir() / group).glob("*.yaml") if ": ???" in path.read_text())
]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "option"), OPEN)
def test_every_value_without_default_is_told_with_an_example(group, option):
    root = "sft" if option == "sft_files" else "ppo"
    with pytest.raises(ConfigError) as caught:
        validate(compose_root(root, [f"{group}={option}"]))
    unset = [fault for fault in caught.value.faults if "is not set" in fault]
    assert unset
    assert all(", such as " in fault for fault in unset), unset


# Rewards of a batch


def by_token(batch: DataProto) -> DataProto:
    """A tenth for each token that is not the first, and a half more for the last of an even row."""
    mask = batch.batch["response_mask"]
    rewards = 0.1 * mask.float()
    rewards[:, 0] = 0.0
    assert set(batch.non_tensor_batch) >= {"prompt_text", "response_text", "answer"}
    return DataProto.from_dict(tensors={"token_level_rewards": rewards})


def unannotated(batch):
    return by_token(batch)


RULE = """
from verl.protocol import DataProto


def by_token(batch: DataProto, worth=0.1) -> DataProto:
    rewards = worth * batch.batch["response_mask"].float()
    return DataProto.from_dict(tensors={"token_level_rewards": rewards})
"""


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("reward_fn", [by_token, unannotated])
def test_a_reward_of_the_batch_says_which_token_is_worth_what(reward_fn, dir32):
    overrides = [*QUIET, *SMALL, "actor=pretrained", f"actor.model.path={dir32}", "algorithm=ppo"]
    overrides += ["data.max_prompt_length=12", "checkpoint=off", "algorithm.mini_batches=1"]
    with LocalPPOTrainer(None, ROWS, reward_fn=reward_fn, overrides=overrides) as made:
        assert made.fit().status == "finished"
        length = made.metrics["rollout/response_length_tokens"]
        assert made.metrics["reward/mean"] == pytest.approx(0.1 * (length - 1), abs=1e-6)


def batch_of(*lengths: int) -> DataProto:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    texts = {"prompt_text": ["q"] * len(lengths), "response_text": ["a"] * len(lengths), "answer": ["a"] * len(lengths)}
    return DataProto.from_dict(tensors={"response_mask": mask}, non_tensors=texts)


@pytest.mark.parametrize(
    ("scores", "placed"),
    [
        (torch.tensor([2.0, 3.0]), [[0, 0, 2], [3, 0, 0]]),
        (torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]), [[1, 2, 3], [4, 0, 0]]),
        (torch.tensor([[1.0, 2.0], [0.0, 0.0]]), [[0, 1, 2], [0, 0, 0]]),
    ],
    ids=["one for each response", "of tokens", "of tokens but the first"],
)
def test_a_function_of_the_batch_may_return_its_scores_as_a_tensor(scores, placed):
    def reward_fn(batch):
        return scores

    assert CallableReward(reward_fn).score_tokens(batch_of(3, 1)).batch["token_level_scores"].tolist() == placed


def test_rewards_of_tokens_go_to_their_tokens_alone_in_a_sum_and_from_a_file(tmp_path):
    batch = batch_of(3, 1)
    scored = CallableReward(by_token).score_tokens(batch)
    assert scored.batch["token_level_scores"].tolist() == [[0, pytest.approx(0.1), pytest.approx(0.1)], [0, 0, 0]]
    assert list(scored["score"]) == pytest.approx([0.2, 0.0])
    total = SumOfRewards({"steps": CallableReward(by_token), "right": ExactMatch()}, {"steps": 10.0, "right": 1.0})
    assert total.score_tokens(batch).batch["token_level_scores"].tolist() == [[0, 1, 2], [1, 0, 0]]
    (tmp_path / "rule.py").write_text(RULE)
    described = RewardFunction(path=f"{tmp_path}/rule.py:by_token", kwargs={"worth": 2.0})
    assert list(described.columns_read()) == []
    assert described.build(None).score_tokens(batch).batch["token_level_scores"].tolist() == [[2, 2, 2], [2, 0, 0]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("give", "kind", "found"),
    [
        (lambda mask: None, RewardError, "NoneType"),
        (lambda mask: {"rewards": mask.float()}, RewardError, "token_level_rewards"),
        (lambda mask: {"token_level_rewards": mask.float()[:, :1]}, RewardError, [2, 1]),
        (lambda mask: {"token_level_rewards": mask * torch.nan}, RewardError, "finite"),
        (lambda mask: {"token_level_rewards": 1.0 + 0 * mask}, RewardError, "response_mask"),
    ],
)
def test_rewards_of_tokens_that_are_none_are_named(give, kind, found):
    def reward(batch):
        tensors = give(batch.batch["response_mask"])
        return None if tensors is None else DataProto.from_dict(tensors=tensors)

    with refusal("reward()", kind=kind, value=found):
        CallableReward(reward).score_tokens(batch_of(3, 1))


# Tokenizers
