"""Distillation: the policy learns from the token probabilities of a teacher, on its own responses or on those of data.

    teacher ──> ref_log_probs [B T]                      of the sampled tokens    ──> advantages    top_k null
            ──> ref_candidates, their log-probs [B T K]  of its likeliest tokens  ──> loss          top_k K

The teacher is the role `reference` with a model of its own. B responses, T response length, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from verl.component import Description, UnitInterval, component
from verl.ops.masking import masked_mean
from verl.protocol import DataProto

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
CANDIDATES = "ref_candidates", "ref_candidate_log_probs"


@component
class Distillation(Description):
    """Learn from a teacher, alone or together with rewards.

    With `top_k` null the log ratio of each sampled token is its advantage, which is mixed with that of the rewards:

        A_t = (1 - coef) * A_t(rewards) + coef * (log teacher(y_t) - log pi_old(y_t))

    Its mean over samples of the policy is the gradient of -KL(pi || teacher) with one token ahead, and the policy loss
    of the algorithm applies. With `top_k` K the loss is a divergence D of two distributions over the teacher's K
    likeliest tokens and one bucket for all others, with its exact gradient:

        L_t = (1 - coef) * L_t(policy loss) + coef * D(teacher, pi)
        reverse_kl   KL(pi || teacher)
        forward_kl   KL(teacher || pi)
        jsd          beta * KL(teacher || m) + (1 - beta) * KL(pi || m),   m = beta * teacher + (1 - beta) * pi

    With `data_fraction` that share of the prompts of a step has the response of the data instead of a sampled one. A
    divergence holds for any tokens; a policy gradient does not, so these rows have no advantage, hence no policy loss.

    Source: on-policy distillation with generalised JSD: Agarwal et al. 2024, arXiv:2306.13649, eq. 1 and algorithm 1.
    Differs: the bucket. A divergence over buckets is never above the one over all tokens, and equals it where K is the
    size of the vocabulary. Of the paper's lambda, `data_fraction` is 1 - lambda, and each step has that share.
    Degenerate: coef 0 is training by rewards alone, data_fraction 1 supervised distillation. A teacher that equals the
    policy has advantages and divergence 0.

    Metric: `distill/divergence_nats`, mean over tokens: of the log ratio log pi_old - log teacher, an estimate of the
    reverse KL, or of the divergence.

    Args:
        divergence: which one; without `top_k` only `reverse_kl` can be estimated.
        top_k: the teacher's likeliest tokens that are compared; null for the sampled token alone.
        coef: share of the teacher against the rewards, in [0, 1].
        beta: of jsd, between 0 and 1.
        data_fraction: share of the prompts of a step whose response is that of the data, in [0, 1]; see
            `verl.rollout.data_responses`.
        completion_key: its column; null for `completion`, or `response` if there is none.
    Raises:
        ConfigError: a number outside its range, or a divergence or share of the data that needs `top_k`.
    """

    divergence: Divergence = "reverse_kl"
    top_k: PositiveInt | None = None
    coef: UnitInterval = 1.0
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    data_fraction: UnitInterval = 0.0
    completion_key: str | None = None

    def faults(self) -> Iterator[str]:
        if self.divergence != "reverse_kl" and self.top_k is None:
            yield (
                f"divergence is {self.divergence}: the sampled tokens alone give no estimate of it. Set top_k, such as "
                "top_k=64, or divergence=reverse_kl."
            )
        if self.data_fraction and self.top_k is None:
            yield (
                f"data_fraction is {self.data_fraction}: the log ratio of one token estimates the divergence where the "
                "policy sampled it, and it did not sample those of the data. Set top_k, such as top_k=64, or "
                "data_fraction=0."
            )

    def mixed_credit(self, credit: DataProto | None, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Advantages with the teacher's part, and metrics.

        Args:
            credit: `advantages` and `returns` of the rewards, [B T]; None with coef 1.
            batch: ref_log_probs, old_log_probs, response_mask, [B T].
        """
        mask = batch["response_mask"]
        if credit is None:
            credit = DataProto.from_dict(dict.fromkeys(("advantages", "returns"), torch.zeros(mask.shape)))
        if self.top_k is not None:
            return credit, {}
        ratio = torch.where(mask, batch["ref_log_probs"] - batch["old_log_probs"], 0.0)
        advantages = (1 - self.coef) * credit["advantages"] + self.coef * ratio
        metrics = {"distill/divergence_nats": masked_mean(-ratio, mask).item()}
        return DataProto.from_dict({"advantages": advantages, "returns": credit["returns"]}), metrics

    def mixed_loss(self, loss: Tensor, candidates: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of each token with the teacher's part, and the divergence without gradient; both [B T].

        Args:
            loss: of the policy loss, [B T].
            candidates: [B T K] nats, log-probs of `ref_candidates` under the weights being updated; carries gradient.
            batch: ref_candidate_log_probs [B T K] and response_mask [B T].
        """
        mask, teacher = batch["response_mask"], batch["ref_candidate_log_probs"]
        divergence = divergence_of(self.divergence, teacher[mask], candidates[mask], self.beta)
        divergence = torch.zeros_like(loss).index_put(mask.nonzero(as_tuple=True), divergence.to(loss.dtype))
        return (1 - self.coef) * loss + self.coef * divergence, divergence.detach()


def divergence_of(kind: Divergence, teacher: Tensor, student: Tensor, beta: float = 0.5) -> Tensor:
    """The divergence between two distributions over K tokens and a bucket for all others.

    Args:
        kind, beta: see `Distillation`.
        teacher, student: [n K] nats, log-probs of the same tokens.
    Returns:
        [n] nats, at least 0 up to rounding.
    """
    teacher, student = _with_bucket(teacher), _with_bucket(student)
    if kind == "reverse_kl":
        return _kl(student, teacher)
    if kind == "forward_kl":
        return _kl(teacher, student)
    weights = torch.tensor([beta, 1 - beta], dtype=teacher.dtype, device=teacher.device).log()
    mean = torch.logaddexp(teacher + weights[0], student + weights[1])
    return beta * _kl(teacher, mean) + (1 - beta) * _kl(student, mean)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(dim=-1)


def _with_bucket(log_probs: Tensor) -> Tensor:
    """[n K+1]: with the logarithm of what is left of 1, at least the rounding of the type."""
    probability_left = 1 - log_probs.exp().sum(dim=-1, keepdim=True)
    return torch.cat([log_probs, probability_left.clamp(min=torch.finfo(log_probs.dtype).eps).log()], dim=-1)
