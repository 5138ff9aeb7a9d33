"""Roles started in this process, for tests that need one running."""

from typing import Any

import torch

from verl.algorithms.advantages import GAE
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.losses import PPOClip
from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.models.pretrained import ModelSource
from verl.models.structure import call_model
from verl.ops.logprobs import log_probs_of, response_positions
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, Rollout
from verl.rollout.hf import HFRollout
from verl.workers.actor import Actor, ActorWorker
from verl.workers.critic import Critic, CriticWorker

PPO = Algorithm(advantage=GAE(), policy_loss=PPOClip())


def start_actor(
    model: ModelSource,
    rollout: Rollout | None = None,
    algorithm: Algorithm = PPO,
    seed: int = 0,
    device: str = "cpu",
    **options: Any,
) -> ActorWorker:
    """An actor; `options` are those of `Actor`."""
    description = Actor(model=model, **{"optimizer": AdamW(lr=1e-3), **options})
    context = BuildContext(device=device, seed=seed, tokenizer=model.load_tokenizer())
    return description.start(
        context, Parallelism(), algorithm, rollout or HFRollout(max_new_tokens=8), total_updates=10
    )


def start_critic(model: ModelSource, algorithm: Algorithm = PPO, **options: Any) -> CriticWorker:
    """A critic on the CPU; `options` are those of `Critic`."""
    description = Critic(model=model, **{"optimizer": AdamW(lr=1e-3), **options})
    return description.start(BuildContext(tokenizer=model.load_tokenizer()), Parallelism(), algorithm, total_updates=10)


def with_experience(rows: DataProto, actor: ActorWorker, seed: int = 0) -> DataProto:
    """Rows of responses with all that roles train on: old log-probs; random advantages, values, returns."""
    rows = rows.union(actor.compute_log_probs(rows))
    generator = torch.Generator().manual_seed(seed)
    mask, dtype = rows["response_mask"], rows["old_log_probs"].dtype
    made = {
        name: torch.randn(mask.shape, generator=generator, dtype=dtype) * mask
        for name in ("advantages", "values", "returns", "ref_log_probs")
    }
    return rows.union(DataProto.from_dict(made))


def experience(actor: ActorWorker, prompts: DataProto, num_samples: int = 3) -> DataProto:
    """Sampled rows with all that roles train on."""
    return with_experience(actor.generate(prompts, GenerationRequest(0, num_samples)), actor)


@torch.no_grad()
def plain_log_probs(model: Any, rows: DataProto, row: int) -> torch.Tensor:
    """Of the response of a row, from a forward pass of the row alone without padding and cache."""
    mask = rows["attention_mask"][row].bool()
    ids, width = rows["input_ids"][row][mask], int(rows["prompt_mask"][row].sum())
    logits = call_model(model, input_ids=ids[None], use_cache=False).logits[0, width - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, ids[width:, None])[:, 0]


@torch.no_grad()
def assert_own_log_probs(model: Any, rows: DataProto, atol: float) -> None:
    """The recorded log-probs are those of a forward pass of the model over the padded rows."""
    fields = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = response_positions(model(**fields, use_cache=False).logits, rows["responses"].shape[1])
    mask, own = rows["response_mask"], log_probs_of(logits, rows["responses"], 1.0)
    assert torch.allclose(rows["rollout_log_probs"][mask], own[mask], atol=atol)


def gap_from_plain_rows(actor: ActorWorker, rows: DataProto, *names: str) -> float:
    """Largest distance of these log-probs from a plain forward pass of each row alone, in nats."""
    worst = 0.0
    for row in range(len(rows)):
        plain = plain_log_probs(actor.model, rows, row)
        for name in names:
            found = rows[name][row][rows["response_mask"][row]].double()
            worst = max(worst, float((found - plain).abs().max()))
    return worst


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the weights."""
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the gradients."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Over all tensors, which must have the same names."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)
