"""Responses of the data in place of sampled ones: which prompts, which tokens, the loss of a mixed batch, resumes."""

import dataclasses
from typing import Any

import pytest
import torch
from image_models import picture, reader
from random_models import save_random_model
from same_training import course, same_training, saved
from torch.nn.functional import kl_div
from trainer.runs import JSONL, PPO_ALGORITHM, Prompts, fit, ppo_run, read_lines, step_lines

from verl.algorithms.advantages import GAE, GRPO
from verl.algorithms.distillation import Distillation
from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.algorithms.importance_sampling import TruncatedIS
from verl.algorithms.kl import NoKL
from verl.component import BuildContext, component
from verl.data.base import DataSplits
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.environments.guess_number import GuessNumber
from verl.errors import ConfigError
from verl.models.pretrained import Pretrained
from verl.rollout.data_responses import DataResponses
from verl.rollout.hf import HFRollout
from verl.workers.reference import Reference

ANSWERS = ("3", "39 or so", "42", "0", "78", "bcdefghij", "0", "13")


@component
class Answered(Prompts):
    """Prompts, each with a response."""

    column: str = "completion"
    answers: tuple[Any, ...] = ANSWERS

    def columns(self) -> dict[str, frozenset[str]]:
        return {"data": frozenset({self.column})}

    def build(self, context: BuildContext) -> DataSplits:
        rows = [{"prompt": p, self.column: a} for p, a in zip(self.train, self.answers, strict=True)]
        return DataSplits(train=RLHFDataset.from_rows(rows, context.tokenizer, {"max_prompt_length": 24}))


def algorithm(**options):
    options = {"top_k": 5, "data_fraction": 0.5, "divergence": "forward_kl"} | options
    names = {"correction", "proximal", "advantage", "epochs", "selection"} & {*options}
    parts = {name: options.pop(name) for name in names}
    base = {"advantage": GRPO(), "kl": NoKL(), "entropy_coef": 0.0, "epochs": 1, "distill": Distillation(**options)}
    return dataclasses.replace(PPO_ALGORITHM, **(base | parts))


@pytest.fixture(scope="module")
def teacher64(tmp_path_factory):
    path = save_random_model(tmp_path_factory.mktemp("teacher") / "model", "starcoder2", torch.float64, hidden_size=64)
    return Reference(model=Pretrained(path=str(path), dtype="float64"))


def mixed(model, teacher, *, distill=None, **parts):
    options = {"data": Answered(), "tracker": JSONL, "save_final": False, "eval_samples": 0, "total_steps": 3}
    options |= {"prompts_per_step": 4, "group_size": 1, "reference": teacher, "critic": None}
    return ppo_run(model, algorithm(**(distill or {})), **(options | parts))


def by_definition(student_logits, teacher_logits, labels, beta):
    """Generalised JSD per learned token, as in eq. 1 of arXiv:2306.13649, and its mean over these."""
    q, p = (x.log_softmax(-1) for x in (student_logits, teacher_logits))
    if beta in (0, 1):
        each = kl_div(*((q, p) if beta == 0 else (p, q)), reduction="none", log_target=True)
    else:
        m = (beta * p.exp() + (1 - beta) * q.exp()).log()
        each = beta * kl_div(m, p, reduction="none", log_target=True)
        each = each + (1 - beta) * kl_div(m, q, reduction="none", log_target=True)
    return each.sum(-1)[labels != -100].mean()


@pytest.mark.slow
@pytest.mark.parametrize(("divergence", "beta"), [("forward_kl", 0), ("reverse_kl", 1), ("jsd", 0.3)])
@pytest.mark.parametrize("proximal", ["trainer", "behaviour"])
def test_the_loss_of_a_mixed_batch_is_that_of_gkd_on_the_same_batch(
    divergence, beta, proximal, model64, dir64, teacher64, tmp_path
):
    options = {"top_k": 10_000, "divergence": divergence, "beta": beta or 0.5, "proximal": proximal}
    options["beta"] = beta if divergence == "jsd" else 0.5
    with mixed(model64, teacher64, distill=options).build(BuildContext(run_dir=tmp_path)) as trainer:
        student, teacher = trainer.cluster.worker("actor").model, trainer.cluster.worker("reference").engine.model
        mix, batches = trainer.with_data, []
        trainer.with_data = lambda *args: batches.append(mix(*args)) or batches[-1]
        before = {name: x.clone() for name, x in student.state_dict().items()}
        metrics = trainer.step(trainer.train_data.collate([1, 2, 4, 5]), 1)
        student.load_state_dict(before)
    batch = batches[0]
    assert sorted((batch["policy_version"] < 0).tolist()) == [False, False, True, True]
    x = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    labels = torch.full_like(x["input_ids"], -100)
    width = batch["responses"].shape[1]
    labels[:, -width:] = batch["responses"].masked_fill(~batch["response_mask"], -100)
    logits = student(**x).logits[:, :-1]
    loss = by_definition(logits, teacher(**x).logits[:, :-1].detach(), labels[:, 1:], beta)
    gradients = torch.autograd.grad(loss, [p for p in student.parameters() if p.requires_grad])
    norm = torch.stack([g.norm() for g in gradients]).norm().item()
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert metrics["actor/approx_kl"] == pytest.approx(0, abs=1e-12)  # responses of the data have no ratio
    assert metrics["rollout/log_prob_gap_max_nats"] < 1e-9  # nor a gap to an engine
    assert "rollout/off_policy_gap_nats" not in metrics
    assert metrics["perf/samples"] == 2  # the policy's


def data_responses(tokenizer, rows, fraction=0.5, max_new_tokens=32, seed=0, **options):
    data = RLHFDataset.from_rows(rows, tokenizer, {"max_prompt_length": 512})
    algorithm_ = algorithm(data_fraction=fraction, **options)
    parts = {
        "rollout": HFRollout(max_new_tokens=max_new_tokens),
        "reference": Reference(model=Pretrained(path="other")),
    }
    run = ppo_run(Pretrained(path="unused"), algorithm_, seed=seed, prompts_per_step=10, **parts)
    return DataResponses(run, data, tokenizer), data


CHATS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_tokens_of_a_row_are_those_that_fine_tuning_learns(is_chat, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHATS)
    prompts = [[{"role": "user", "content": text}] if is_chat else text for text in ("1+2=", "what is 6*7? ", "9-")]
    rows = [{"prompt": p, "response": a} for p, a in zip(prompts, ANSWERS)]
    mix, data = data_responses(tokenizer, rows, fraction=1)
    made = mix.rows(data.collate([0, 1, 2]), step=1)
    learned = SFTDataset.from_rows(rows, tokenizer)
    for row in range(3):
        shown = made["attention_mask"][row].bool()
        assert made["input_ids"][row][shown].tolist() == learned[row]["input_ids"].tolist()
        response = made["responses"][row][made["response_mask"][row]].tolist()
        assert response == learned[row]["input_ids"][learned[row]["loss_mask"]].tolist()
        assert response[-1] == tokenizer.eos_token_id


def test_each_step_chooses_its_share_by_seed_and_step_alone(tokenizer):
    rows = [{"prompt": f"{number}=", "completion": str(number)} for number in range(40)]
    mix, data = data_responses(tokenizer, rows, fraction=0.3)
    again, _ = data_responses(tokenizer, rows, fraction=0.3)
    other, _ = data_responses(tokenizer, rows, fraction=0.3, seed=1)
    prompts, chosen = data.collate(range(10, 20)), []
    for step in range(1, 20):
        given = mix.rows(prompts, step)["prompt_ids"].tolist()
        assert len(given) == 3
        assert sorted([*given, *mix.sampled(prompts, step)["prompt_ids"].tolist()]) == list(range(10, 20))
        assert again.rows(prompts, step)["prompt_ids"].tolist() == given
        chosen.append((given, other.rows(prompts, step)["prompt_ids"].tolist()))
    assert len({tuple(given) for given, _ in chosen}) > 10
    assert sum(one != two for one, two in chosen) > 10
    alone, _ = data_responses(tokenizer, rows, fraction=1)
    assert len(alone.rows(prompts, 1)) == 10
    assert len(alone.sampled(prompts, 1)) == 1
    none, _ = data_responses(tokenizer, rows, fraction=0)
    assert none.rows(prompts, 1) is None
    assert none.sampled(prompts, 1)["prompt_ids"].tolist() == list(range(10, 20))


def test_a_response_is_cut_where_a_generated_one_ends(tokenizer):
    mix, data = data_responses(tokenizer, [{"prompt": "a", "completion": "b" * 50}] * 2, max_new_tokens=4)
    rows = mix.rows(data.collate([0, 1]), 1)
    assert rows["responses"].tolist() == [tokenizer("bbbb")["input_ids"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["sync", *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("ahead", "in_flight"))]
)
def test_a_resumed_run_goes_on_with_the_same_rows(how, model32, tmp_path):
    teacher = save_random_model(tmp_path / "teacher", "qwen2", torch.float32, hidden_size=64)
    late = {} if how == "sync" else {"mode": "async", "max_staleness": 1}
    if how == "in_flight":
        late |= {"rollout": HFRollout(max_new_tokens=7, weight_update="in_flight")}
    options = {"reference": Reference(model=Pretrained(path=str(teacher))), "data": Answered(), "eval_samples": 0}
    options |= {"prompts_per_step": 3, "group_size": 1, "critic": None, **late}
    kind = algorithm(correction=TruncatedIS() if late else None)
    fit(course(model32, tmp_path / "whole", kind, **options), tmp_path / "whole/run")
    fit(course(model32, tmp_path / "cut", kind, stop_after=2, **options), tmp_path / "cut/first")
    fit(course(model32, tmp_path / "cut", kind, resume="latest", **options), tmp_path / "cut/run")
    same_training(saved(tmp_path / "cut"), saved(tmp_path / "whole"), after=2)


def test_with_rewards_too_a_response_of_the_data_has_no_policy_loss(model64, teacher64, tmp_path):
    distill = {"coef": 0.5, "epochs": 2}
    with mixed(model64, teacher64, distill=distill, group_size=2).build(BuildContext(run_dir=tmp_path)) as trainer:
        mix, batches = trainer.with_data, []
        trainer.with_data = lambda *args: batches.append(mix(*args)) or batches[-1]
        metrics = trainer.step(trainer.train_data.collate([1, 2, 4, 5]), 1)
    batch = batches[0]
    is_of_data = batch["policy_version"] < 0
    assert is_of_data.tolist() == [False] * 4 + [True] * 2  # two groups of two, two responses of the data
    assert batch["advantages"][is_of_data].abs().max() == 0
    assert batch["advantages"][~is_of_data].abs().max() > 0
    assert metrics["perf/samples"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.5, 1])
def test_the_policy_comes_near_its_teacher_on_responses_of_the_data(fraction, model64, teacher64, tmp_path):
    distill = {"data_fraction": fraction, "top_k": 10_000}
    run = mixed(model64, teacher64, distill=distill, total_steps=20, prompts_per_step=8, lr=1e-2)
    fit(run, tmp_path)
    gaps = [line["distill/divergence_nats"] for line in step_lines(tmp_path)]
    assert len(gaps) == 20
    assert gaps[-1] < 0.5 * gaps[0], gaps


def test_evaluations_and_samples_show_the_policy_alone(model64, teacher64, tmp_path):
    fit(mixed(model64, teacher64, total_steps=1, sample_rows=8), tmp_path)
    shown = [line for file in tmp_path.glob("*.jsonl") for line in read_lines(file) if "ids" in line]
    assert all(min(line["versions"]) >= 0 for line in shown)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: Distillation(data_fraction=0.5), "data_fraction is 0.5: the log ratio of one token"),
        (lambda run: run(distill={"data_fraction": 0.1}), "of trainer.prompts_per_step 4 that is none or all"),
        (lambda run: run(distill={"data_fraction": 0.9}), "a share of at least one prompt that leaves one"),
        (lambda run: run(environment=GuessNumber()), "environment is set, and a response of the data is no episode"),
        (
            lambda run: run(data=Answered(column="text")),
            "completion_key is None: the rows of data have no column 'completion'. Their columns: text",
        ),
        (lambda run: run(distill={"completion_key": "answer"}), "have no column 'answer'"),
        (lambda run: run(distill={"advantage": GAE(), "coef": 0.5}), "a critic does not learn from responses"),
        (lambda run: run(distill={"selection": DynamicSampling()}), "algorithm.selection fills a step with responses"),
    ],
)
def test_what_cannot_be_mixed_is_refused_before_anything_loads(change, message, teacher64):
    def run(environment=None, **parts):
        described = mixed(Pretrained(path="unused"), teacher64, **parts)
        return dataclasses.replace(described, environment=environment)

    with pytest.raises(ConfigError, match=message):
        change(run)


@pytest.mark.parametrize("answer", ["", None, 5])
def test_a_row_without_a_response_is_refused_with_its_number(answer, model64, teacher64, tmp_path):
    answers = (*ANSWERS[:6], answer, ANSWERS[7])
    with pytest.raises(ConfigError, match=r"completion_key: completion is .* at row 6 of the training rows: expected"):
        fit(mixed(model64, teacher64, data=Answered(answers=answers)), tmp_path)


def test_responses_of_the_data_have_the_images_of_their_prompts():
    tokenizer = reader()
    rows = [{"prompt": "a", "completion": "b", "images": [picture(0)]}, {"prompt": "a", "completion": "c"}]
    mix, data = data_responses(tokenizer, rows, fraction=1)
    prompts = data.collate([1, 0])
    found = mix.rows(prompts, 1)
    assert torch.equal(found["media.pixel_values"][1], prompts["media.pixel_values"][1])
    assert found["media.pixel_values"].lengths.tolist()[0] == 0
    assert torch.equal(found["media_keys"], prompts["media_keys"])
