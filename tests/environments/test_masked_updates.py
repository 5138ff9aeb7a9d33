"""What the policy did not write takes no part in an update: a whole GRPO step against a computation by hand."""

from __future__ import annotations

import pytest
import torch
from environments.episodes import Scripted, prompts_of
from roles import gradients

from verl.algorithms.advantages import GAE, GRPO
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.critic_free_advantages import OPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from verl.algorithms.kl import KLInLoss
from verl.algorithms.losses import CISPO, GSPO, PPOClip
from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.environments.base import StepResult
from verl.models.tiny import TinyModel
from verl.protocol import DataProto
from verl.rewards.episode_reward import EpisodeReward
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.workers.actor import Actor

MODEL = TinyModel(context_length=128, dtype="float64", hidden_size=32, intermediate_size=64)
EACH_ENDS = tuple(range(20, 60))


def answer(row, turn, action):
    return StepResult("37\n" * turn, len(action.text) * 0.25 - turn, terminated=turn >= 3)


def started(algorithm, **options):
    description = Actor(model=MODEL, optimizer=AdamW(lr=1e-3, max_grad_norm=1e9), **options)
    context = BuildContext(tokenizer=MODEL.load_tokenizer())
    rollout = HFRollout(max_new_tokens=6, stop_token_ids=EACH_ENDS)
    return description.start(context, Parallelism(), algorithm, rollout, 10, None, Scripted(answer=answer))


def played(actor, num_samples=4):
    prompts = prompts_of(actor.tokenizer, ["1+2=", "what is 6*7? "])
    rows = actor.generate(prompts, GenerationRequest(1, num_samples))
    scores = EpisodeReward().score_batch(rows).token_scores.double()
    assert (~rows["response_mask"] & (rows["attention_mask"][:, -rows["responses"].shape[1] :] == 1)).any()
    return rows.union(DataProto.from_dict({"token_level_rewards": scores}))


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_a_grpo_step_on_episodes_is_what_it_is_by_hand(packing):
    algorithm = Algorithm(advantage=GRPO(), policy_loss=PPOClip(), aggregation="seq-mean-token-mean")
    actor = started(algorithm, packing=packing)
    rows = played(actor)
    rows = rows.union(actor.compute_log_probs(rows))
    rows = rows.union(algorithm.advantage(rows))

    records = rows["episode"]
    scores = [
        sum(len(turn["text"]) * 0.25 - n for n, turn in enumerate(record["turns"], 1) if turn["is_complete"])
        for record in records
    ]
    total, own = torch.zeros((), dtype=torch.float64), actor.model
    own.zero_grad()
    for row in range(len(rows)):
        group = [scores[i] for i in range(len(rows)) if rows["group_ids"][i] == rows["group_ids"][row]]
        of_group = torch.tensor(group, dtype=torch.float64)
        advantage = (scores[row] - of_group.mean()) / (of_group.std() + 1e-6)
        ids = rows["input_ids"][row][rows["attention_mask"][row].bool()]
        prompt = int(rows["prompt_mask"][row].sum())
        log_probs = own(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        per_turn, place, losses = records[row]["turns"], prompt, []
        for turn in per_turn:
            for t in range(place, place + turn["tokens"]):
                chosen = log_probs[t - 1, ids[t]]
                ratio = torch.exp(chosen - chosen.detach())
                losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
            place += turn["tokens"] + turn["observed"]
        total = total + torch.stack(losses).mean() / len(rows)
    total.backward()
    expected = gradients(own)
    own.zero_grad()
    metrics = actor.update(rows.select([name for name in rows.batch if name not in ("turn_ids", "turn_rewards")], []))
    found = gradients(own)
    assert metrics["loss"] == pytest.approx(float(total.detach()), abs=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def moved_out(rows):
    """The same rows, with the tokens on the mask side by side."""
    mask = rows["response_mask"]
    width = int(mask.sum(dim=1).max())
    fields = {}
    for name, x in rows.batch.items():
        if name == "response_mask":
            fields[name] = torch.arange(width) < mask.sum(dim=1)[:, None]
        elif x.shape == mask.shape:
            own = [torch.nn.functional.pad(a[m], (0, width - int(m.sum()))) for a, m in zip(x, mask, strict=True)]
            fields[name] = torch.stack(own)
        elif x.dim() == 1:
            fields[name] = x
    return DataProto.from_dict(fields)


ESTIMATORS = [
    GAE(gamma=0.97, lam=0.9),
    GRPO(),
    RLOO(),
    OPO(),
    ReinforcePlusPlus(gamma=0.9),
    ReinforcePlusPlusBaseline(),
]


@pytest.mark.first_rows(3)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda x: type(x).__name__)
def test_every_estimator_credits_an_episode_as_if_observations_were_not_there(estimator):
    rows = played(started(Algorithm(advantage=GRPO(), policy_loss=PPOClip())))
    mask = rows["response_mask"]
    values = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * mask
    rows = rows.union(DataProto.from_dict({"values": values}))
    found, dense = estimator(rows), moved_out(rows)
    expected = estimator(dense)
    for name in ("advantages", "returns"):
        torch.testing.assert_close(found[name][mask], expected[name][dense["response_mask"]], rtol=1e-9, atol=1e-12)
        assert not found[name][~mask].any()


def test_a_discount_by_turn_does_not_count_the_tokens_of_a_turn():
    rows = played(started(Algorithm(advantage=GRPO(), policy_loss=PPOClip())))
    mask, rewards = rows["response_mask"], rows["token_level_rewards"]
    values = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * mask
    rows = rows.union(DataProto.from_dict({"values": values}))
    found = GAE(gamma=0.5, lam=0.8, whiten=False, discount="turn")(rows)["advantages"]
    for row in range(len(rows)):
        advantage = following = 0.0
        places, turns = mask[row].nonzero()[:, 0].tolist(), rows["turn_ids"][row]
        for place, after in reversed(list(zip(places, [*places[1:], None], strict=True))):
            is_last = after is not None and turns[after] != turns[place]
            gamma, decay = (0.5, 0.4) if is_last else (1.0, 1.0)
            advantage = float(rewards[row, place]) + gamma * following - float(values[row, place]) + decay * advantage
            following = float(values[row, place])
            assert float(found[row, place]) == pytest.approx(advantage, abs=1e-9)


@pytest.mark.parametrize("loss", [PPOClip(), GSPO(), CISPO()], ids=lambda x: type(x).__name__)
def test_losses_metrics_and_kl_do_not_see_observations(loss):
    algorithm = Algorithm(advantage=GRPO(), policy_loss=loss, kl=KLInLoss(coef=0.1))
    rows = played(started(algorithm))
    mask = rows["response_mask"]
    noise = torch.Generator().manual_seed(2)
    made = {name: torch.randn(mask.shape, dtype=torch.float64, generator=noise) * 0.3 * mask for name in (
        "old_log_probs", "ref_log_probs", "advantages")}  # fmt: skip
    rows = rows.union(DataProto.from_dict(made))
    new = rows["old_log_probs"] + 0.1 * rows["advantages"]
    dense = moved_out(rows.union(DataProto.from_dict({"log_probs": new})))
    sparse = dict(rows.batch)
    for part, found_of in (("loss", lambda p, x: loss(p, x)[0]), ("kl", lambda p, x: algorithm.kl.loss(p, x))):
        found = found_of(new, sparse)[mask]
        expected = found_of(dense["log_probs"], dict(dense.batch))[dense["response_mask"]]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=part)
