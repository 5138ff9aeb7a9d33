"""Supervised fine-tuning: the likelihood of the marked tokens, counted over the whole batch."""

import math

import pytest
import torch
from roles import gradients, largest_difference

from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.protocol import DataProto
from verl.workers.actor import Actor
from verl.workers.sft import SFTWorker

TEXTS = (("1+2=", "3"), ("40+2=", "42 and more"), ("7=", "seven"))


@pytest.fixture
def batch(tokenizer):
    """Texts padded on the right, with the loss on the answers."""
    rows = [tokenizer(q)["input_ids"] + tokenizer(a)["input_ids"] + [tokenizer.eos_token_id] for q, a in TEXTS]
    width = max(map(len, rows)) + 2
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    positions = torch.arange(width).expand(3, -1)
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    questions = torch.tensor([len(q) for q, _ in TEXTS])[:, None]
    attention = positions < lengths
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention.long(),
            "position_ids": torch.where(attention, positions, 0),
            "loss_mask": attention & (positions >= questions),
        }
    )


def start(model, **options):
    role = Actor(model=model, **{"optimizer": AdamW(lr=1e-2, max_grad_norm=None), **options})
    return SFTWorker.start(role, BuildContext(tokenizer=model.load_tokenizer()), Parallelism(), total_updates=10)


def test_the_loss_is_the_mean_over_the_marked_tokens(model64, batch):
    learner = start(model64)
    logits = model64.load_causal_lm("cpu")(batch["input_ids"]).logits[:, :-1].log_softmax(dim=-1)
    nll = -logits.gather(2, batch["input_ids"][:, 1:, None])[..., 0][batch["loss_mask"][:, 1:]]
    found = learner.evaluate(batch)
    assert found["tokens"] == len(nll) == sum(len(answer) + 1 for _, answer in TEXTS)
    assert found["nll"] == pytest.approx(float(nll.detach().sum()), abs=1e-9)
    assert learner.update(batch)["loss"] == pytest.approx(float(nll.detach().mean()), abs=1e-9)


def test_the_token_budget_changes_nothing(model64, batch):
    whole, cut = start(model64), start(model64, micro_batch_tokens=1)
    assert whole.update(batch)["loss"] == pytest.approx(cut.update(batch)["loss"], abs=1e-10)
    assert largest_difference(gradients(whole.engine.model), gradients(cut.engine.model)) < 1e-10


def test_it_learns_its_texts_by_heart(model64, batch):
    learner = start(model64, optimizer=AdamW(lr=3e-2))
    for _ in range(25):
        learner.update(batch)
    found = learner.evaluate(batch)
    assert found["correct"] == found["tokens"]
    assert found["nll"] / found["tokens"] < math.log(2)


def test_a_share_without_rows_adds_nothing(model64, batch):
    assert start(model64).evaluate(batch[:0]) == {"tokens": 0.0}
