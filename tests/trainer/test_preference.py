"""Preference optimisation and reward models as a whole: they learn, resume bit by bit, and divide as they do alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from refusals import refusal
from same_training import ROUNDING, Training, digest, numbers, same_training
from trainer.preference_runs import DATA, preference_run, trained
from trainer.runs import every_step, weights
from typer.testing import CliRunner

from verl.algorithms.preference_losses import DPO, IPO, KTO, ORPO, BradleyTerry, SimPO
from verl.cli.checkpoint import app
from verl.component import BuildContext
from verl.compose.load_policy import locate_policy
from verl.data.files import PreferenceFiles
from verl.engines.optimizer import AdamW
from verl.engines.sharding import FSDP, NoSharding
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rewards.reward_model import RewardModel, RewardTokens
from verl.trainer.sft import PreferenceRun
from verl.workers.reference import PrecomputedReference


def fit(run, directory: Path):
    with run.build(BuildContext(run_dir=directory)) as trainer:
        return trainer.fit()


LEARNERS = [DPO(), IPO(), KTO(), ORPO(), SimPO(), BradleyTerry(centre_coef=0.01)]


@pytest.mark.slow
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


def precomputing(run):
    return replace(run, reference=PrecomputedReference())


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [NoSharding(), pytest.param(FSDP(timeout_s=60.0), marks=pytest.mark.exhaustive)])
def test_a_resumed_run_has_them_from_the_checkpoint_and_loads_no_reference(sharding, model32, tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    processes = {"sharding": sharding, "n_gpus_per_node": 2 if isinstance(sharding, FSDP) else 1, "total_steps": 6}
    run = precomputing(preference_run(model32, DPO(), checkpoint=every_step(whole), **processes))
    with run.build(BuildContext(run_dir=whole / "run")) as trainer:
        if isinstance(sharding, NoSharding):
            assert not hasattr(trainer.cluster.worker("reference"), "engine")  # freed
        trainer.fit()
    point = str(whole / "checkpoints/global_step_2")
    run = replace(run, checkpoint=every_step(again), resume=point)
    with run.build(BuildContext(run_dir=again / "run")) as trainer:
        assert trainer.reference is None
        trainer.fit()
    left, right = (Training(numbers(x / "run"), digest=digest(x)) for x in (again, whole))
    same_training(left, right, after=2)


@pytest.mark.slow
def test_micro_batches_and_packing_change_no_number(model64, tmp_path):
    run = preference_run(model64, DPO())
    cut = trained(replace(run, actor=replace(run.actor, micro_batch_tokens=1, packing="off")), tmp_path / "cut")
    whole = trained(replace(run, actor=replace(run.actor, micro_batch_tokens=4096)), tmp_path / "whole")
    for training in (cut, whole):
        training.metrics[1].pop("rewards/accuracies")  # of margins that are rounding alone
    same_training(cut, whole, ROUNDING)


def rewards_of(directory, batch):
    """Scores of rows by `reward=model`."""
    saved = Pretrained(path=str(directory))
    assert saved.classifier_fault() is None
    reward = RewardModel(model=saved).build(BuildContext(tokenizer=saved.load_tokenizer()))
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    zeros = torch.zeros(len(batch)).numpy()
    return reward._scores(RewardTokens([ids[mask].tolist() for ids, mask in rows], None, zeros))


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "lora"])
def test_the_directory_of_a_reward_model_gives_its_scores_to_a_reward(lora, model32, tmp_path):
    run = preference_run(model32, BradleyTerry(), lora, total_steps=3)
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        trainer.fit()
        batch = trainer.eval_data.collate(range(6))
        scores = trainer.learner.row_scores(batch).result()["row_scores"]
    directory = tmp_path / "run/reward_model"
    assert scores.std() > 1e-3
    torch.testing.assert_close(rewards_of(directory, batch), scores, rtol=0, atol=1e-5)
    saved = replace(run.actor, model=Pretrained(path=str(directory)), lora=None)
    with replace(run, actor=saved).build(BuildContext(run_dir=tmp_path / "more")) as more:
        again = more.learner.row_scores(batch).result()["row_scores"]  # training may go on from it
    torch.testing.assert_close(again, scores, rtol=0, atol=1e-5)


@pytest.fixture
def adapted(model64, tmp_path):
    """The trainer of a float64 reward model with an adapter after two steps, a batch, and the final directory."""
    directory = tmp_path / "adapted"
    run = preference_run(model64, BradleyTerry(), LoRA(rank=2), total_steps=2, checkpoint=every_step(directory))
    run = replace(run, actor=replace(run.actor, optimizer=AdamW(lr=3e-3, max_grad_norm=None)))
    with run.build(BuildContext(run_dir=directory / "run")) as trainer:
        trainer.fit()
        yield trainer, trainer.eval_data.collate(range(3)), directory / "run/reward_model"


def peft_of(directory):
    found = AutoPeftModelForSequenceClassification.from_pretrained(
        directory, num_labels=1, dtype=torch.float64, is_trainable=True
    )
    return found.eval()


def last_logits(model, batch):
    """Scores in the order of the rows, each alone and without padding."""
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    return torch.stack([model(input_ids=ids[mask][None]).logits[0, 0] for ids, mask in rows])


def test_loss_and_gradients_of_adapter_and_head_are_those_of_peft(adapted):
    """The loss is that of TRL's RewardTrainer: -logsigmoid(chosen - rejected), its mean over pairs."""
    trainer, batch, directory = adapted
    model = peft_of(directory)
    logits = last_logits(model, batch)
    torch.testing.assert_close(trainer.learner.row_scores(batch).result()["row_scores"], logits, rtol=0, atol=1e-12)
    chosen, rejected = logits.chunk(2)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    loss.backward()
    coefs, metrics = trainer._evaluated(batch)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-12)
    learner = trainer.cluster.worker("learner")
    learner.update(batch.union(DataProto.from_dict({"row_coefs": coefs})))
    own = {name: x.grad for name, x in learner.engine.parameters.items() if x.requires_grad}
    theirs = {
        name.replace("score.modules_to_save.default", "head")
        .removeprefix("base_model.model.")
        .replace("model.", "backbone.base_model.model.", 1): x.grad
        for name, x in model.named_parameters()
        if x.requires_grad
    }
    assert own.keys() == theirs.keys()
    assert sum("lora_" in name for name in own) == len(own) - 1
    for name, x in own.items():
        torch.testing.assert_close(x, theirs[name], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_saved_adapter_has_the_head_in_full_and_merges_into_a_whole_reward_model(adapted, tmp_path):
    trainer, batch, directory = adapted
    scores = trainer.learner.row_scores(batch).result()["row_scores"]
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    point, out = directory.parents[1] / "checkpoints/global_step_2", tmp_path / "merged"
    export = ["export", str(point), "--component", "reward_model"]
    assert CliRunner().invoke(app, [*export, str(out), "--merge"]).exit_code == 0
    assert not (out / "adapter_config.json").exists()
    assert CliRunner().invoke(app, [*export, str(tmp_path / "adapter")]).exit_code == 0
    for found in (out, tmp_path / "adapter", directory):
        torch.testing.assert_close(rewards_of(found, batch), scores, rtol=0, atol=1e-5)
    with refusal("PATH", value=point):
        locate_policy(str(point))


def test_losses_of_pairs_refuse_labelled_responses_and_kto_takes_pairs_apart(model32, tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text('{"prompt": "1+2=", "completion": "3", "label": true}\n' * 3)
    labelled = PreferenceFiles(train_files=[str(file)], max_length=64)
    run = preference_run(model32, DPO(), data=labelled, batch_size=2)
    with refusal("data", value="DPO"):
        run.build(BuildContext(run_dir=tmp_path / "run"))
    with preference_run(model32, KTO()).build(BuildContext(run_dir=tmp_path / "kto")) as trainer:
        assert len(trainer.train_data) == 48
