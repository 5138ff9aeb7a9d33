"""Distillation: divergences over the teacher's likeliest tokens, its part of advantages, and what is refused."""

import dataclasses

import pytest
import torch
from http_client.servers import serving
from random_models import save_random_model
from refusals import refused
from rollout.speaking import Speaker
from trainer.runs import JSONL, PPO_ALGORITHM, fit, ppo_run, step_lines

from verl.algorithms.critic_free_advantages import RLOO
from verl.algorithms.distillation import Distillation, divergence_of
from verl.algorithms.kl import KLInLoss, NoKL
from verl.models.pretrained import Pretrained
from verl.models.tiny import TinyModel
from verl.protocol import DataProto
from verl.rollout.server.config import ServerRollout
from verl.workers.reference import Reference

KINDS = ("reverse_kl", "forward_kl", "jsd")


def distributions(vocabulary=12, rows=5):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64) * 2
    return logits[0].log_softmax(-1), logits[1].requires_grad_()


def over_all_tokens(kind, teacher, student, beta):
    """The definitions, by probabilities."""
    p, q = teacher.exp(), student.exp()
    m = beta * p + (1 - beta) * q

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    return {"reverse_kl": kl(q, p), "forward_kl": kl(p, q), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_tokens_it_is_the_divergence_of_the_definition_and_its_gradient(kind):
    teacher, logits = distributions()
    student = logits.log_softmax(-1)
    order = teacher.argsort(dim=-1, descending=True)
    ours = divergence_of(kind, teacher.gather(-1, order), student.gather(-1, order), 0.3)
    theirs = over_all_tokens(kind, teacher, student, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_for_other_tokens_only_lowers_it_and_a_teacher_like_the_policy_gives_zero(kind):
    teacher, logits = distributions()
    student, last = logits.log_softmax(-1), 0.0
    for k in (1, 4, 8, 12):
        best = teacher.topk(k).indices
        value = divergence_of(kind, teacher.gather(-1, best), student.gather(-1, best)).mean()
        assert last <= value.item() + 1e-12
        last = value.item()
        assert divergence_of(kind, teacher.gather(-1, best), teacher.gather(-1, best)).abs().max() < 1e-12
    assert last > 0.1


def test_advantages_mix_the_log_ratio_of_the_sampled_tokens_with_those_of_the_rewards():
    mask = torch.tensor([[True, True, False]])
    columns = {"ref_log_probs": [[-1.0, -2.0, 9.0]], "old_log_probs": [[-3.0, -1.5, 0.0]]}
    batch = DataProto.from_dict({**{k: torch.tensor(v) for k, v in columns.items()}, "response_mask": mask})
    credit = DataProto.from_dict({"advantages": torch.tensor([[1.0, -1.0, 0.0]]), "returns": torch.zeros(1, 3)})
    mixed, metrics = Distillation(coef=0.25).mixed_credit(credit, batch)
    assert mixed["advantages"].tolist() == [[0.75 + 0.25 * 2, -0.75 - 0.25 * 0.5, 0.0]]
    assert metrics == {"distill/divergence_nats": -0.75}
    alone, _ = Distillation().mixed_credit(None, batch)
    assert alone["advantages"].tolist() == [[2.0, -0.5, 0.0]]


def algorithm(**options):
    return dataclasses.replace(
        PPO_ALGORITHM, advantage=RLOO(), kl=NoKL(), epochs=1, mini_batches=1, distill=Distillation(**options)
    )


test_what_cannot_be_distilled_is_refused = refused(
    ("divergence", "jsd", lambda: Distillation(divergence="jsd")),
    ("coef", 2, lambda: Distillation(coef=2)),
    ("kl", "teacher", lambda: dataclasses.replace(algorithm(), kl=KLInLoss(coef=0.1))),
    ("reference.model", "teacher=MODEL", lambda: ppo_run(TinyModel(), algorithm())),
    ("reference", None, lambda: ppo_run(TinyModel(), algorithm(), reference=None)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5, "divergence": "jsd"}, {"top_k": 10_000, "coef": 0.5, "divergence": "forward_kl"}],
    ids=["sampled", "top_5_jsd", "all_tokens_and_rewards"],
)
def test_the_policy_comes_near_its_teacher(options, tmp_path):
    teacher = Reference(model=TinyModel(hidden_size=32, intermediate_size=64, seed=5))
    run = ppo_run(
        TinyModel(hidden_size=64, intermediate_size=64), algorithm(**options), lr=1e-2, reference=teacher,
        total_steps=15, tracker=JSONL, save_final=False, prompts_per_step=8, group_size=8,
    )  # fmt: skip
    fit(run, tmp_path)
    gaps = [line["distill/divergence_nats"] for line in step_lines(tmp_path)]
    assert len(gaps) == 15
    assert sum(gaps[-4:]) < 0.7 * sum(gaps[:4]), gaps


def distilled(model, teacher_dir, **parts):
    """A run of 3 steps whose loss compares the teacher's 5 likeliest tokens."""
    options = {"lr": 1e-3, "total_steps": 3, "tracker": JSONL, "save_final": False, "eval_samples": 0}
    teacher = Reference(model=Pretrained(path=str(teacher_dir), dtype=model.dtype))
    return ppo_run(model, algorithm(top_k=5), reference=teacher, **(options | parts))


def test_responses_of_a_server_are_distilled(dir32, model32, tmp_path):
    teacher = save_random_model(tmp_path / "teacher", "qwen2", torch.float32, hidden_size=64)
    speaker = Speaker(dir32)
    with serving(speaker.post, speaker.page) as server:
        rollout = ServerRollout(endpoint=server.endpoint(), max_new_tokens=7)
        fit(distilled(model32, teacher, rollout=rollout), tmp_path / "run")
    lines = step_lines(tmp_path / "run")
    assert [line["sync/probe_gap_nats"] < 1e-4 for line in lines] == [True] * 3
    assert all(line["distill/divergence_nats"] > 0.01 for line in lines)
    assert len(speaker.reloads) == 4  # before the first response, and after each step
