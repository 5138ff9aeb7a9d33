"""Trainer: the loop of main_ppo.py one step at a time, with objects for configuration."""

from __future__ import annotations

import copy
import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import short_where
from http_client.servers import serving
from random_models import save_random_classifier
from refusals import refusal, refused
from rollout.speaking import Speaker
from trainer.runs import Arbitrary
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.checkpoint.manager import CheckpointManager
from verl.errors import CheckpointCorrupt, CheckpointNotFound, RewardError
from verl.models.pretrained import Pretrained
from verl.rewards.normalization import RewardNormalization
from verl.rewards.reward_model import RewardModel
from verl.rewards.rules import ExactMatch
from verl.trainer.api.from_objects import data_from_object
from verl.trainer.api.trainer import Trainer

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(3)]
SMALL = {"lr": 3e-3, "prompts_per_step": 3, "total_steps": 4, "eval_samples": 0, "num_threads": 1, "eval_before": False}
QUIET = ("tracker=none", "trainer.save_final=false")


def digits(prompts, responses, answer):
    return [sum(c.isdigit() for c in text) / 5 for text in responses]


def letters(prompts, responses, answer):
    return [sum(c.isalpha() for c in text) / 5 for text in responses]


def trainer(model, **changes) -> Trainer:
    arguments = {
        "model": model,
        "reward_model": Arbitrary(),
        "train_dataset": ROWS,
        "rollout_config": {"max_new_tokens": 5, "n": 2},
        "overrides": QUIET,
    }
    train_config = {**SMALL, **changes.pop("train_config", {})}
    return Trainer(**{**arguments, "train_config": train_config, **changes})


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def actor_of(made: Trainer):
    return made.trainer.cluster.worker("actor")  # type: ignore


def all_equal(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# What is refused before weights load


def gold(prompts, responses, solution):
    return [0.0 for _ in responses]


@pytest.fixture
def empty(dir32, tmp_path):
    """A model that cannot be loaded."""
    return str(shutil.copytree(dir32, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


UNANSWERED = [{"prompt": "1"}]
ABSENT = ExactMatch(answer_key="gold")
test_a_column_that_is_missing_is_found_before_weights_load = refused(
    ("reward.gold()", "solution", lambda empty: trainer(empty, reward_model=gold)),
    ("reward.answer_key", "gold", lambda empty: trainer(empty, reward_model=ABSENT)),
    ("reward.reward.answer_key", "gold", lambda empty: trainer(empty, reward_model=RewardNormalization(reward=ABSENT))),
    ("reward.answer_key", "answer", lambda empty: trainer(empty, reward_model=ExactMatch(), eval_dataset=UNANSWERED)),
)


# Steps


def test_steps_one_by_one_are_the_steps_of_fit_and_train_the_very_model(model32, tokenizer):
    ends = []
    for _ in range(2):
        model = model32.load_causal_lm("cpu")
        places = [p.data_ptr() for p in model.parameters()]
        with trainer(model, tokenizer=tokenizer) as made:
            if not ends:
                losses = [made.step() for _ in range(4)]
                assert made.steps == 4
                assert losses[-1] == made.metrics["actor/loss"]
            else:
                result = made.fit()
                assert (result.status, result.steps) == ("finished", 4)
                assert result.last_metrics["actor/loss"] == losses[-1]  # type: ignore
        assert [p.data_ptr() for p in model.parameters()] == places
        ends.append(weights(model))
    assert all_equal(*ends)
    assert not all_equal(ends[0], weights(model32.load_causal_lm("cpu")))


def test_an_error_ends_the_run_and_is_recorded(dir32):
    def broken(prompts, responses, answer):
        raise ValueError("no such thing")

    with pytest.raises(RewardError, match="no such thing"), trainer(dir32, reward_model=broken) as made:
        made.step()
    summary = json.loads((made.run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "no such thing" in summary["error"]


def test_a_closed_trainer_says_so(dir32):
    made = trainer(dir32)
    made.close()
    for call in (made.step, made.fit, made.save_checkpoint):
        with refusal("this"):
            call()


def test_evaluation_is_asked_for_and_needs_rows(dir32):
    with trainer(dir32, eval_dataset=ROWS[:2]) as made:
        assert "eval/accuracy" in made.evaluate()
    with trainer(dir32) as made, refusal("eval_dataset"):
        made.evaluate()


# Checkpoints


COURSES = {
    "grpo": {},
    "ppo with a critic": {"algorithm": "ppo"},
    "an adapter": {"lora": {"rank": 2}},
    "saved while training goes on": {"checkpoint_config": {"save_dir": "own", "save_interval": 1}},
}


@pytest.mark.slow
@pytest.mark.parametrize("course", short_where(COURSES, "ppo with a critic".__eq__))
def test_saved_loaded_and_continued_is_uninterrupted_bit_for_bit(course, dir32):
    options = COURSES[course]
    with trainer(dir32, **options) as whole:
        first = [whole.step() for _ in range(2)]
        saved = whole.save_checkpoint(save_dir="aside")
        drawn = torch.rand(1)
        last = whole.step()
        end = weights(actor_of(whole).model)
        whole.load_checkpoint(saved)  # back, in the same trainer
        assert whole.steps == 2
        assert torch.equal(torch.rand(1), drawn)
        assert whole.step() == last
        assert all_equal(weights(actor_of(whole).model), end)
    with trainer(
        dir32, **{**options, "checkpoint_config": None}
    ) as other:  # and in another one, that went astray before
        assert other.step() == first[0]
        other.load_checkpoint("aside")
        assert other.step() == last
        assert all_equal(weights(actor_of(other).model), end)


@pytest.mark.slow
def test_a_tag_names_the_directory_and_the_run_directory_leads_to_it(dir32):
    with trainer(dir32, checkpoint_config={"save_dir": "own", "save_interval": None}) as made:
        made.step()
        tagged = made.save_checkpoint(tag="loss_0.12_step_500")
        assert tagged == Path("own/loss_0.12_step_500").absolute()
        assert CheckpointManager(tagged).step == 1
        made.step()
        assert made.save_checkpoint(save_dir="own").name == "global_step_2"
        made.load_checkpoint(tagged)
        assert made.steps == 1
        made.step()
        made.load_checkpoint("latest")
        assert made.steps == 2
        with pytest.raises(ValueError, match="names? a directory|no name|letters"):
            made.save_checkpoint(tag="../x")


@pytest.mark.slow
def test_the_actor_alone_leaves_optimizer_step_and_data_as_they_are(dir32):
    with trainer(dir32) as first:
        first.step()
        first.step()
        saved, end = first.save_checkpoint("aside"), weights(actor_of(first).model)
    with trainer(dir32) as made:
        made.load_checkpoint(saved, load_components=["actor"])
        assert all_equal(weights(actor_of(made).model), end)
        assert made.steps == 0
        assert not actor_of(made).engine.optimizer_tensors()
        assert actor_of(made).engine.updates == 0
        assert made.trainer.sampler.state_dict()["position"] == 0
        made.load_checkpoint(saved, load_components=["optimizer"])
        assert actor_of(made).engine.updates == 2
        assert actor_of(made).engine.optimizer_tensors()


@pytest.mark.parametrize(
    "options",
    short_where(
        [{"mmap": True}, {"device_map": "cpu"}, {"mmap": True, "device_map": {"": "cpu"}}],
        lambda options: len(options) == 2,
    ),
)
def test_the_way_that_bytes_take_changes_no_bit(options, dir32):
    with trainer(dir32) as made:
        made.step()
        saved, end = made.save_checkpoint("aside"), weights(actor_of(made).model)
        moments = {name: x.clone() for name, x in actor_of(made).engine.optimizer_tensors().items()}
        made.step()
        made.load_checkpoint(saved, **options)
        assert all_equal(weights(actor_of(made).model), end)
        assert all(torch.equal(x, moments[name]) for name, x in actor_of(made).engine.optimizer_tensors().items())


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_before_anything_changes(dir32):
    with trainer(dir32, algorithm="ppo") as made:
        made.step()
        file = made.save_checkpoint("aside") / "critic/model.safetensors"
        file.chmod(0o644)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        made.step()
        before = weights(actor_of(made).model)
        with pytest.raises(CheckpointCorrupt, match="model.safetensors"):
            made.load_checkpoint("aside/global_step_1")
        assert all_equal(weights(actor_of(made).model), before)
        assert made.steps == 2


@pytest.mark.slow
def test_other_weights_or_rows_of_the_same_form_are_another_training(dir32):
    model = AutoModelForCausalLM.from_pretrained(dir32)
    again, changed, tokenizer = copy.deepcopy(model), copy.deepcopy(model), AutoTokenizer.from_pretrained(dir32)
    with torch.no_grad():
        changed.get_output_embeddings().weight[0, 0] += 1e-3  # type: ignore
    with trainer(model, tokenizer=tokenizer) as made:
        made.step()
        saved, expected = made.save_checkpoint("aside"), made.step()
    with trainer(again, tokenizer=tokenizer) as same:
        same.load_checkpoint(saved)
        assert same.step() == expected
    other_model, other_rows = ("actor.model.weights_digest", "critic.model.weights_digest"), ("data.rows_digest",)
    for arguments, paths in (
        ({"model": changed, "tokenizer": tokenizer}, other_model),
        ({"model": copy.deepcopy(again), "train_dataset": [ROWS[1], *ROWS[1:]]}, (*other_model, *other_rows)),
    ):
        with trainer(**{"tokenizer": tokenizer, **arguments}) as other, refusal(*paths, "path"):
            other.load_checkpoint(saved)


class Endless:  # as a data set of torch, which need not raise IndexError
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"prompt": f"{index}+1="}


def test_rows_may_be_a_data_set_of_torch(dir32):
    rows: Any = Endless()
    with trainer(
        dir32, train_dataset=rows, eval_dataset=rows, reward_model=lambda prompts, responses: [0.0] * len(prompts)
    ) as made:
        assert len(made.trainer.train_data) == 3


def test_rows_with_other_images_are_other_rows():
    image = pytest.importorskip("PIL.Image")
    images = [*(image.new("RGB", (2, 2), color) for color in ("red", "blue")), Path("a.png"), Path("b.png")]
    made: list[Any] = [data_from_object([{"prompt": "1", "images": [x]}]) for x in images]
    assert len({source.rows_digest for source in made}) == 4


def test_statistics_of_scores_are_not_those_of_another_function_of_the_same_name(dir32):
    with trainer(dir32, reward_model=digits) as made:
        content = made.trainer.description.reward.content_digest
    renamed = types.FunctionType(letters.__code__, globals(), "digits")
    renamed.__qualname__ = "digits"
    with trainer(dir32, reward_model=renamed) as made:
        assert made.trainer.description.reward.name == "digits"
        assert content != made.trainer.description.reward.content_digest != ""


def test_what_cannot_be_loaded_is_refused_in_words(dir32, tmp_path):
    with trainer(dir32) as made:
        made.step()
        saved = made.save_checkpoint("aside")
        for name, given, value in (
            ("load_components", ["actr"], "actr"),
            ("load_components", ["critic"], "critic"),
            ("load_components", "actor", "actor"),
            ("device_map", "cuda:99", "cuda:99"),
        ):
            with refusal(name, value=value):
                made.load_checkpoint(saved, **{name: given})  # type: ignore
        with refusal("path", value="/no/such/run"):
            made.load_checkpoint("/no/such/run")
        with refusal(kind=CheckpointNotFound):
            made.load_checkpoint("latest")
    with trainer(dir32, train_dataset=ROWS[:6]) as other:
        with refusal("data.num_rows", "data.rows_digest", "path", value=6):
            other.load_checkpoint(saved)
        other.load_checkpoint(saved, load_components=["actor", "optimizer"])
        assert other.step()
    from random_models import save_random_model

    wider = save_random_model(tmp_path / "wider", "qwen2", torch.float32, hidden_size=48)
    with trainer(wider) as other, refusal("path", value=[102, 48]):
        other.load_checkpoint(saved, load_components=["actor"])


# Another reward


def test_a_reward_is_replaced_while_policy_optimizer_and_data_stay(dir32):
    with trainer(dir32, reward_model=digits) as made:
        made.step()
        engine, place = actor_of(made).engine, made.trainer.sampler.state_dict()
        before, moments = weights(engine.model), {n: x.clone() for n, x in engine.optimizer_tensors().items()}
        made.reward_model = letters
        assert all_equal(weights(engine.model), before)
        assert all(torch.equal(x, moments[name]) for name, x in engine.optimizer_tensors().items())
        assert (made.trainer.sampler.state_dict(), made.steps, engine.updates) == (place, 1, 1)
        assert made.reward_model.score(["1"], ["ab1"], answer=[""]) == [0.4]  # type: ignore
        made.step()
        saved = made.save_checkpoint("aside")
        assert CheckpointManager(saved).state["config"]["reward"]["name"] == "letters"
        made.reward_model = digits
        made.load_checkpoint(saved)  # a reward is not a part of what makes a training the same
        made.step()
        with refusal("reward_model"):
            made.reward_model = 5
        made.step()


def test_the_statistics_of_a_reward_are_saved_loaded_and_reset(dir32, tmp_path):
    path = save_random_classifier(tmp_path / "classifier", "qwen2")
    rated = RewardModel(model=Pretrained(path=str(path)), normalize="running")
    with trainer(dir32, reward_model=rated) as made:
        made.step()
        learned = made.reward_model.state_dict()
        saved = made.save_checkpoint("aside")
        made.reset_reward_stats()
        assert made.reward_model.state_dict() != learned
        made.load_checkpoint(saved)
        assert made.reward_model.state_dict() == learned


def test_rewards_come_in_many_forms(dir32, tmp_path, tokenizer):
    path = save_random_classifier(tmp_path / "classifier", "qwen2")
    Path("mine.py").write_text("def rate(prompts, responses):\n    return [1.0 for _ in responses]\n")
    classifier = Pretrained(path=str(path)).load_classifier("cpu")

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, input_ids, attention_mask):
            return type("Answer", (), {"scores": attention_mask.sum(1).float() * self.weight})

    with trainer(dir32, reward_model=str(path), eval_dataset=ROWS[:4]) as made:
        by_path = made.evaluate()["eval/score"]
        made.reward_model = classifier
        assert made.evaluate()["eval/score"] == by_path
        for reward, (least, most) in {
            ExactMatch(): (0, 1), "mine.py:rate": (1, 1), Own(): (2, 20), digits: (0, 1), Arbitrary(): (0, 1)
        }.items():  # fmt: skip
            made.reward_model = reward
            assert least <= made.evaluate()["eval/score"] <= most
            made.step()


@pytest.mark.slow
def test_an_engine_that_needs_an_address_is_given_it_as_a_mapping_or_an_endpoint(dir32):
    speaker = Speaker(dir32)
    with serving(speaker.post, speaker.page) as server:
        for endpoint in ({"base_url": server.url}, server.endpoint()):
            engine = {"engine": "server", "endpoint": endpoint, "max_new_tokens": 4, "n": 2}
            with trainer(dir32, rollout_config=engine) as made:
                made.step()
            assert made.metrics["sync/probe_gap_nats"] < 1e-4
    with refusal("rollout.endpoint.base_url"):
        trainer(dir32, rollout_config={"engine": "server"})


# What is refused


def loaded(model32):
    return model32.load_causal_lm("cpu")


def foreign(dir32):
    tokenizer = AutoTokenizer.from_pretrained(dir32)
    tokenizer.add_tokens(["<more>", "<still more>"])
    return tokenizer


NEAREST = ("rollout.max_new_token", "data.prompt_kee", "trainer.totl_steps", "trainer.learning_rate")
MISSPELT = {"rollout_config": {"max_new_token": 5}, "checkpoint_config": {"save_intervall": 5}}
MISSPELT |= {"train_config": {"totl_steps": 5, "learning_rate": 1}, "data_config": {"prompt_kee": "x"}}
TWO = ["sharding=ddp", "trainer.n_gpus_per_node=2", *QUIET]
FREE = ["algorithm.kl.coef=0", *QUIET]
test_parts_that_do_not_fit_are_refused_by_name = refused(
    ((*NEAREST, "checkpoint.save_intervall"), "trainer.total_steps?", lambda dir32: trainer(dir32, **MISSPELT)),
    (("model", "reward_model"), "missing", lambda: Trainer()),
    ("tokenizer", "name", lambda: Trainer("m", reward_model=digits, tokenizer="name")),
    ("eval_dataset", "train_dataset", lambda: Trainer("m", reward_model=digits, eval_dataset=ROWS)),
    ("actor.model.tokenizer", "Qwen2ForCausalLM", lambda model32: trainer(loaded(model32))),
    ("model", "generate", lambda model32, tokenizer: trainer(model32.load_backbone("cpu"), tokenizer=tokenizer)),
    ("model", "int", lambda: trainer(5)),
    ("model.path", "/nowhere/at/all", lambda: trainer("/nowhere/at/all")),
    ("reward_model", 3.0, lambda dir32: trainer(dir32, reward_model=3.0)),
    ("reward_model", "ExactMatch", lambda dir32: trainer(dir32, reward_model=ExactMatch)),
    ("train_dataset", "int", lambda dir32: trainer(dir32, train_dataset=3)),
    ("algorithm=grop", "grpo?", lambda dir32: trainer(dir32, algorithm="grop")),
    ("actor.model.model", 104, lambda model32, dir32: trainer(loaded(model32), tokenizer=foreign(dir32))),
    ("critic_model", "values", lambda dir32: trainer(dir32, critic_model=str(dir32))),
    ("ref_model", 0, lambda dir32: trainer(dir32, ref_model=str(dir32), overrides=FREE)),
    ("sharding=ddp", "model", lambda model32, tokenizer: trainer(loaded(model32), tokenizer=tokenizer, overrides=TWO)),
    first=5,
)


def test_every_model_may_be_an_object_and_only_the_policy_changes(model32, tokenizer):
    loaded = {name: model32.load_causal_lm("cpu") for name in ("model", "ref_model", "critic_model")}
    before = {name: weights(model) for name, model in loaded.items()}
    with trainer(**loaded, tokenizer=tokenizer, algorithm="ppo") as made:
        made.step()
        made.step()
        critic = made.trainer.cluster.worker("critic").engine.model.backbone  # type: ignore
        assert critic is loaded["critic_model"].base_model
    assert not all_equal(weights(loaded["model"]), before["model"])
    assert all_equal(weights(loaded["ref_model"]), before["ref_model"])


def test_what_the_user_froze_stays_frozen(model32, tokenizer):
    model = model32.load_causal_lm("cpu")
    model.get_input_embeddings().requires_grad_(False)
    before = [model.get_input_embeddings().weight.clone(), model.lm_head.weight.clone()]
    with trainer(model, tokenizer=tokenizer) as made:
        made.step()
        made.step()
    assert torch.equal(model.get_input_embeddings().weight, before[0])
    assert not torch.equal(model.lm_head.weight, before[1])


def test_a_short_file_lies_below_the_arguments_and_overrides_above(dir32):
    Path("short.yaml").write_text("trainer: {seed: 5, prompts_per_step: 2}\nrollout: {temperature: 0.5}\n")
    settings = {**SMALL}
    del settings["prompts_per_step"]
    made = Trainer(
        model=dir32, reward_model=digits, train_dataset=ROWS, config="short.yaml", train_config=settings,
        rollout_config={"max_new_tokens": 5}, overrides=["trainer.total_steps=9", *QUIET],
    )  # fmt: skip
    with made:
        run = made.run
        assert (run.trainer.seed, run.trainer.prompts_per_step, run.rollout.temperature) == (5, 2, 0.5)
        assert (run.trainer.total_steps, run.trainer.eval_before) == (9, False)
