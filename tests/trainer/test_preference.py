"""Preference optimisation and reward models as a whole: they learn, resume bit by bit, and divide as they do alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from same_training import ROUNDING, Training, digest, numbers, same_training
from trainer.runs import JSONL, weights

from verl.algorithms.preference_losses import DPO, IPO, KTO, ORPO, BradleyTerry, SimPO
from verl.checkpoint.config import Checkpointing
from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.data.arithmetic import ArithmeticPreferences
from verl.data.files import PreferenceFiles
from verl.engines.optimizer import AdamW
from verl.engines.sharding import DDP, FSDP, NoSharding
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.rewards.reward_model import RewardModel, RewardTokens
from verl.trainer.config import SFTSettings
from verl.trainer.sft import PreferenceRun, RewardModelRun
from verl.workers.actor import Actor
from verl.workers.reference import PrecomputedReference, Reference

DATA = ArithmeticPreferences(digits=1, train_size=24, held_out=12)


def preference_run(model, loss, lora=None, sharding=None, checkpoint=None, resume=None, data=DATA, **settings):
    of_policy = not isinstance(loss, BradleyTerry)
    kind = PreferenceRun if of_policy else RewardModelRun
    settings = {"batch_size": 6, "total_steps": 4, "num_threads": 1, "eval_interval": 2, **settings}
    return kind(
        actor=Actor(model=model, optimizer=AdamW(lr=3e-3), lora=lora, micro_batch_tokens=40),
        sharding=sharding or NoSharding(),
        data=data,
        loss=loss,
        trainer=SFTSettings(**settings),
        tracker=JSONL,
        checkpoint=checkpoint,
        resume=resume,
        **({"reference": Reference()} if of_policy else {}),
    )


def fit(run, directory: Path):
    with run.build(BuildContext(run_dir=directory)) as trainer:
        return trainer.fit()


LEARNERS = [DPO(), IPO(), KTO(), ORPO(), SimPO(), BradleyTerry(centre_coef=0.01)]


@pytest.mark.parametrize("loss", LEARNERS, ids=lambda loss: type(loss).__name__)
def test_rewards_of_chosen_responses_rise_above_those_of_rejected_ones(loss, model32, tmp_path):
    run = preference_run(model32, loss, total_steps=25, eval_interval=0)
    last = fit(replace(run, data=replace(DATA, train_size=6, held_out=2)), tmp_path / "run").last_metrics
    assert last["rewards/margins"] > 0.05
    assert last.get("rewards/accuracies", 1.0) >= 5 / 6


def test_the_first_step_has_the_loss_of_a_policy_that_is_its_reference(model32, tmp_path):
    result = fit(preference_run(model32, DPO(), eval_before=True), tmp_path / "run")
    assert list(result.evaluations) == [0, 2, 4]
    assert result.evaluations[0]["eval/loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert result.evaluations[0]["eval/rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert result.evaluations[4].keys() <= set(PreferenceRun.evaluated)
    assert result.samples == 4 * 2 * 6


def saves(directory: Path) -> Checkpointing:
    return Checkpointing(save_dir=str(directory), save_interval=1, keep_last_n=None, save_async=False)


@pytest.mark.parametrize(
    ("loss", "lora"),
    [(DPO(), LoRA(rank=2)), (KTO(), None), (BradleyTerry(), None)],
    ids=["dpo with lora", "kto", "reward model"],
)
def test_a_run_resumed_from_a_checkpoint_ends_as_the_uninterrupted_one(loss, lora, model32, tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    fit(preference_run(model32, loss, lora, checkpoint=saves(whole / "checkpoints")), whole / "run")
    point = str(whole / "checkpoints/global_step_2")
    fit(preference_run(model32, loss, lora, checkpoint=saves(again / "checkpoints"), resume=point), again / "run")
    left, right = (Training(numbers(x / "run"), digest=digest(x)) for x in (again, whole))
    same_training(left, right, after=2)


def precomputing(run):
    return replace(run, reference=PrecomputedReference())


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "lora"])
def test_log_probs_of_the_reference_computed_before_training_change_no_bit_of_an_epoch(lora, model32, tmp_path):
    run = preference_run(model32, DPO(), lora, batch_size=5, eval_before=True)  # 4 batches of 5, and 4 rows left
    each, once = (Training(fitted(x, tmp_path / name)) for name, x in (("each", run), ("once", precomputing(run))))
    same_training(each, once)
    for name, x in weights(tmp_path / "each").items():
        assert x.equal(weights(tmp_path / "once")[name])


def fitted(run, directory: Path) -> dict:
    fit(run, directory)
    return numbers(directory)


@pytest.mark.parametrize("sharding", [NoSharding(), pytest.param(FSDP(timeout_s=60.0), marks=pytest.mark.exhaustive)])
def test_a_resumed_run_has_them_from_the_checkpoint_and_loads_no_reference(sharding, model32, tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    processes = {"sharding": sharding, "n_gpus_per_node": 2 if isinstance(sharding, FSDP) else 1, "total_steps": 6}
    run = precomputing(preference_run(model32, DPO(), checkpoint=saves(whole / "checkpoints"), **processes))
    with run.build(BuildContext(run_dir=whole / "run")) as trainer:
        if isinstance(sharding, NoSharding):
            assert not hasattr(trainer.cluster.worker("reference"), "engine")  # freed
        trainer.fit()
    point = str(whole / "checkpoints/global_step_2")
    run = replace(run, checkpoint=saves(again / "checkpoints"), resume=point)
    with run.build(BuildContext(run_dir=again / "run")) as trainer:
        assert trainer.reference is None
        trainer.fit()
    left, right = (Training(numbers(x / "run"), digest=digest(x)) for x in (again, whole))
    same_training(left, right, after=2)


def trained(run, directory: Path) -> Training:
    metrics = {}
    with run.build(BuildContext(run_dir=directory)) as trainer:
        for step, rows in enumerate([[0, 1, 2, 3, 4], [7, 6, 5, 2], [3, 8]], start=1):
            metrics[step] = trainer.step(trainer.train_data.collate(rows), step) | trainer.evaluate(step)
        trainer.save(directory)
    return Training(metrics, weights=weights(directory))


@pytest.mark.parametrize(
    ("loss", "sharding"),
    [
        pytest.param(DPO(label_smoothing=0.1), FSDP(timeout_s=60.0), id="dpo, fsdp"),
        pytest.param(KTO(), DDP(timeout_s=60.0), id="kto, ddp", marks=pytest.mark.exhaustive),
        pytest.param(ORPO(), FSDP(timeout_s=60.0), id="orpo, fsdp", marks=pytest.mark.exhaustive),
        pytest.param(BradleyTerry(), DDP(timeout_s=60.0), id="reward model, ddp", marks=pytest.mark.exhaustive),
        pytest.param(
            BradleyTerry(centre_coef=0.1),
            FSDP(timeout_s=60.0),
            id="reward model, fsdp",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_two_processes_train_as_one_does(loss, sharding, model64, tmp_path):
    alone = trained(preference_run(model64, loss), tmp_path / "one")
    shared = preference_run(model64, loss, sharding=sharding, n_gpus_per_node=2)
    same_training(alone, trained(shared, tmp_path / "two"), ROUNDING)


def test_micro_batches_and_packing_change_no_number(model64, tmp_path):
    run = preference_run(model64, DPO())
    cut = trained(replace(run, actor=replace(run.actor, micro_batch_tokens=1, packing="off")), tmp_path / "cut")
    whole = trained(replace(run, actor=replace(run.actor, micro_batch_tokens=4096)), tmp_path / "whole")
    same_training(cut, whole, ROUNDING)


def test_the_directory_of_a_reward_model_gives_its_scores_to_a_reward(model32, tmp_path):
    run = preference_run(model32, BradleyTerry(), total_steps=3)
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        trainer.fit()
        batch = trainer.eval_data.collate(range(6))
        scores = trainer.learner.row_scores(batch).result()["row_scores"]
    saved = Pretrained(path=str(tmp_path / "run/reward_model"))
    assert saved.classifier_fault() is None
    reward = RewardModel(model=saved).build(BuildContext(tokenizer=saved.load_tokenizer()))
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    found = reward._scores(RewardTokens([ids[mask].tolist() for ids, mask in rows], None, torch.zeros(12).numpy()))
    assert scores.std() > 1e-3
    torch.testing.assert_close(found, scores, rtol=0, atol=1e-5)
    with replace(run, actor=replace(run.actor, model=saved)).build(BuildContext(run_dir=tmp_path / "more")) as more:
        again = more.learner.row_scores(batch).result()["row_scores"]  # training may go on from it
    torch.testing.assert_close(again, scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("root", "overrides", "message"),
    [
        ("dpo", ["reference=none"], "reference is null: DPO compares with one"),
        ("dpo", ["loss=bradley_terry"], "loss is BradleyTerry: not a loss of this command. Set loss=sigmoid, ipo"),
        ("reward_model", ["loss=simpo"], "loss is SimPO: not a loss of this command. Set loss=bradley_terry"),
        ("dpo", ["loss=kto", "reference=precomputed"], "reference is a PrecomputedReference: KTO reads other rows"),
        ("dpo", ["loss=kto", "++trainer.batch_size=1"], "trainer.batch_size is 1: the loss reads responses to other"),
        ("reward_model", ["++actor.lora={_target_:verl.models.lora.LoRA}"], "actor.lora is set: reward=model reads"),
        ("dpo", ["++data.max_length=65"], "data.max_length is 65: actor.model holds 64 tokens"),
        ("dpo", ["++data.max_length=9"], "max_length is 9: a problem of 2 digits"),
        ("dpo", ["++loss.beta=0"], "loss.beta is 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(root, overrides, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        validate(compose_root(root, ["actor=tiny_scratch", *overrides]))


def test_losses_of_pairs_refuse_labelled_responses_and_kto_takes_pairs_apart(model32, tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text('{"prompt": "1+2=", "completion": "3", "label": true}\n' * 3)
    labelled = PreferenceFiles(train_files=[str(file)], max_length=64)
    run = preference_run(model32, DPO(), data=labelled, batch_size=2)
    with pytest.raises(ConfigError, match="data has single responses: DPO compares pairs"):
        run.build(BuildContext(run_dir=tmp_path / "run"))
    with preference_run(model32, KTO()).build(BuildContext(run_dir=tmp_path / "kto")) as trainer:
        assert len(trainer.train_data) == 48
