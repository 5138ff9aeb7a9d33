"""The training engine: how a batch is cut, padded or ordered changes no result, and a bad step changes no weight."""

import math

import pytest
import torch
from roles import PPO, experience, gradients, largest_difference, start_actor, start_critic, weights

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import KLInLoss
from verl.engines.engine import TrainingEngine
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.protocol import DataProto
from verl.rollout.hf import HFRollout

STOP_OFTEN = HFRollout(max_new_tokens=9, stop_token_ids=tuple(range(10, 25)))
UNCLIPPED = AdamW(lr=1e-2, max_grad_norm=None, weight_decay=0.1)


@pytest.fixture(scope="module")
def batch(model64, prompts):
    """Rows of many lengths; the shortest response has one token."""
    rows = experience(start_actor(model64, STOP_OFTEN), prompts(), num_samples=4)
    lengths = rows["response_mask"].sum(dim=1)
    assert lengths.min() == 1
    assert lengths.max() == 9
    return rows


def updated(model, batch, role=start_actor, **options):
    """Gradients, weights and metrics after one update."""
    worker = role(model, **{"optimizer": UNCLIPPED, **options})
    metrics = worker.update(batch)
    return gradients(worker.engine.model), weights(worker.engine.model), metrics


def assert_agree(left, right, bound=1e-10):
    for a, b in zip(left, right, strict=True):
        if isinstance(a, dict) and a and not isinstance(next(iter(a.values())), torch.Tensor):
            assert a == pytest.approx(b, abs=bound)
        else:
            assert largest_difference(a, b) < bound


def replaced(batch, **fields):
    """The batch with some fields of other content."""
    return DataProto.from_dict({**batch.batch, **fields})


@pytest.mark.first_rows(2)
@pytest.mark.parametrize("role", [start_actor, start_critic])
@pytest.mark.parametrize("budget", [1, 45])
def test_the_token_budget_changes_neither_gradients_nor_weights_nor_metrics(model64, batch, role, budget):
    whole = updated(model64, batch, role, micro_batch_tokens=10**6)
    assert_agree(updated(model64, batch, role, micro_batch_tokens=budget), whole)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_token_budget_changes_nothing_under_any_aggregation(model64, batch, aggregation):
    algorithm = Algorithm(
        advantage=PPO.advantage,
        policy_loss=PPO.policy_loss,
        kl=KLInLoss(coef=0.1),
        entropy_coef=0.01,
        aggregation=aggregation,
    )
    whole = updated(model64, batch, algorithm=algorithm)
    assert {"kl_loss", "entropy"} <= whole[2].keys()
    assert_agree(updated(model64, batch, algorithm=algorithm, micro_batch_tokens=30), whole)


def test_what_stands_in_padding_changes_nothing(model64, batch):
    noise = torch.randint(3, 100, batch["input_ids"].shape)
    attended, mask = batch["attention_mask"].bool(), batch["response_mask"]
    dirty = replaced(
        batch,
        input_ids=torch.where(attended, batch["input_ids"], noise),
        responses=torch.where(mask, batch["responses"], noise[:, -mask.shape[1] :]),
        position_ids=torch.where(attended, batch["position_ids"], noise % 60),
        **{name: batch[name].masked_fill(~mask, 7.0) for name in ("advantages", "old_log_probs", "values", "returns")},
    )
    for role in (start_actor, start_critic):
        assert_agree(updated(model64, dirty, role), updated(model64, batch, role))
    actor = start_actor(model64)
    a, b = actor.compute_log_probs(dirty), actor.compute_log_probs(batch)
    for name in ("old_log_probs", "entropies"):
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-10)


def test_more_padding_on_both_sides_changes_nothing(model64, batch):
    wide = {}
    for name, x in batch.batch.items():
        left = (
            3
            if x.ndim == 2 and name in ("prompts", "prompt_mask", "input_ids", "attention_mask", "position_ids")
            else 0
        )
        right = 5 if x.ndim == 2 and name not in ("prompts", "prompt_mask") else 0
        wide[name] = torch.nn.functional.pad(x, (left, right)) if x.ndim == 2 else x
    assert_agree(updated(model64, DataProto.from_dict(wide)), updated(model64, batch))


def test_the_order_of_rows_changes_their_order_alone(model64, batch):
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    assert_agree(updated(model64, batch[order]), updated(model64, batch))
    actor = start_actor(model64, micro_batch_tokens=45)
    straight, shuffled = actor.compute_log_probs(batch), actor.compute_log_probs(batch[order])
    torch.testing.assert_close(shuffled["old_log_probs"], straight["old_log_probs"][order], rtol=0, atol=1e-10)


def test_gradients_do_not_pile_up_over_updates(model64, batch):
    actor = start_actor(model64, optimizer=AdamW(lr=0.0, max_grad_norm=None))
    actor.update(batch)
    once = gradients(actor.model)
    actor.update(batch)
    assert largest_difference(gradients(actor.model), once) < 1e-12


def test_gradient_checkpointing_changes_nothing(model64, batch):
    for role in (start_actor, start_critic):
        assert_agree(updated(model64, batch, role, gradient_checkpointing=True), updated(model64, batch, role))


@pytest.mark.parametrize("checkpointing", [True, False])
def test_layers_run_in_training_mode_and_twice_if_they_recompute(model64, batch, checkpointing):
    actor = start_actor(model64, micro_batch_tokens=10**6, gradient_checkpointing=checkpointing)
    modes: list[bool] = []
    actor.first_batch.longest = 10**6
    actor.model.model.layers[0].self_attn.register_forward_hook(lambda module, *given: modes.append(module.training))
    actor.update(batch)
    assert modes == [True] * (2 if checkpointing else 1)


def test_inference_gives_zeros_off_the_mask_and_something_on_it(model64, batch):
    found = start_actor(model64, micro_batch_tokens=45).compute_log_probs(batch)
    mask = batch["response_mask"]
    for name in ("old_log_probs", "entropies"):
        assert found[name].shape == mask.shape
        assert not found[name][~mask].any()
        assert found[name][mask].abs().min() > 0


def test_metrics_are_means_over_the_tokens_of_the_whole_batch(model64, batch):
    shifted = replaced(batch, old_log_probs=batch["old_log_probs"] - 0.3 * batch["response_mask"].double())
    metrics = start_actor(model64, micro_batch_tokens=30).update(shifted)
    mask, advantages = batch["response_mask"], batch["advantages"]
    ratio = torch.tensor(0.3, dtype=torch.float64).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * 1.2)[mask]
    assert metrics["loss"] == pytest.approx(float(losses.mean()), abs=1e-9)
    assert metrics["ratio"] == pytest.approx(float(ratio), abs=1e-9)
    assert metrics["clip_fraction"] == pytest.approx(float((advantages[mask] > 0).double().mean()), abs=1e-9)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_not_made_and_leaves_everything_as_it_was(model64, batch, wrong):
    actor = start_actor(model64, optimizer=UNCLIPPED)
    actor.update(batch)
    before, moments = weights(actor.model), actor.engine.optimizer.state_dict()["state"]
    steps = [int(state["step"]) for state in moments.values()]
    advantages = batch["advantages"].clone()
    advantages[0, 0] = wrong
    assert not math.isfinite(actor.update(replaced(batch, advantages=advantages))["loss"])
    assert largest_difference(weights(actor.model), before) == 0
    assert [int(state["step"]) for state in actor.engine.optimizer.state_dict()["state"].values()] == steps
    assert actor.version == 1
    actor.update(batch)
    assert largest_difference(weights(actor.model), before) > 0


def test_a_batch_without_rows_gives_no_rows_and_a_share_without_rows_trains_nothing(model64, batch):
    actor, critic = start_actor(model64), start_critic(model64)
    assert len(actor.compute_log_probs(batch[:0])) == len(critic.compute_values(batch[:0])) == 0
    before = weights(actor.model)
    assert actor.update(batch[:0])["grad_norm"] == 0
    assert largest_difference(weights(actor.model), before) == 0


def test_rows_without_any_chosen_token_add_nothing(model64, batch):
    silent = batch["response_mask"].clone()
    silent[::2] = False
    some = replaced(batch, response_mask=silent)
    assert_agree(updated(model64, some), updated(model64, batch[1::2]))
    metrics = start_actor(model64).update(replaced(batch, response_mask=torch.zeros_like(silent)))
    assert metrics["loss"] == metrics["grad_norm"] == 0


CLIPPED = AdamW(lr=1e-2, max_grad_norm=0.5, weight_decay=0.1)


def training_engine(model64):
    return TrainingEngine(model64.load_causal_lm("cpu"), Parallelism(), 45, CLIPPED, total_updates=3, packing="off")


def sum_of_nll(model, x):
    """Negative log-likelihood of the responses, written out, and the number of their tokens."""
    inputs = {name: x[name] for name in ("input_ids", "attention_mask", "position_ids")}
    width = x["responses"].shape[1]
    log_probs = model(**inputs, use_cache=False).logits[:, -width - 1 : -1].log_softmax(-1)
    of_tokens = log_probs.gather(-1, x["responses"].clamp(min=0)[..., None])[..., 0]
    return -(of_tokens * x["response_mask"]).sum(), x["response_mask"].sum()


def nll(model, micro, totals):
    return sum_of_nll(model, micro.tensors)[0] / totals.tokens, {}


@pytest.mark.parametrize("parts", [1, 2])
def test_forward_backward_and_optim_step_make_the_step_that_plain_torch_makes(model64, batch, parts):
    """Two calls of forward_backward accumulate: the step is that of the sum of both losses."""
    batches, engine = [batch[part::parts] for part in range(parts)], training_engine(model64)
    totals = [engine.forward_backward(rows, nll) for rows in batches]
    metrics = engine.optim_step()

    model = model64.load_causal_lm("cpu").train()
    decayed = [[p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    groups = [{"params": decayed[0], "weight_decay": 0.1}, {"params": decayed[1], "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=CLIPPED.lr, betas=CLIPPED.betas, eps=CLIPPED.eps), []
    for rows in batches:
        whole, tokens = sum_of_nll(model, rows)
        losses.append(whole / tokens)
        losses[-1].backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED.max_grad_norm))
    optimizer.step()
    assert largest_difference(weights(engine.model), weights(model)) < 1e-10
    assert norm > CLIPPED.max_grad_norm
    assert metrics == pytest.approx({"loss": float(sum(losses)), "grad_norm": norm, "lr": CLIPPED.lr}, abs=1e-10)
    assert [x.tokens for x in totals] == [float(rows["response_mask"].sum()) for rows in batches]


def test_an_optimizer_step_without_gradients_is_refused(model64, batch):
    engine = training_engine(model64)
    engine.update(batch, nll)
    with pytest.raises(RuntimeError, match="forward_backward"):
        engine.optim_step()
    engine.forward_backward(batch, nll)
    engine.release()
    with pytest.raises(RuntimeError, match="forward_backward"):
        engine.optim_step()


def test_gradients_of_a_pass_that_failed_are_in_no_later_step(model64, batch):
    engine = training_engine(model64)

    def fails(model, micro, totals):
        raise MemoryError

    engine.forward_backward(batch[::2], nll)
    with pytest.raises(MemoryError):
        engine.forward_backward(batch, fails)
    assert engine.update(batch, nll) == training_engine(model64).update(batch, nll)
