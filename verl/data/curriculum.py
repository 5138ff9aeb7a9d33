"""Curricula: prompts are sampled by their recorded pass rates; resumes exactly.

    scores of a step ──> pass rate of each prompt ──> band ──> weight ──> the next batches

A batch is a function of the seed, its position in the run and the pass rates recorded when it was sampled; batches
sampled ahead are kept, and a checkpoint holds them and the pass rates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from verl.component import Description, UnitInterval, component
from verl.data.sampler import STATE_KEYS, DataSampler


@component
class Curriculum(Description):
    """Base class of curricula."""

    def sampler(self, prompt_ids: Sequence[int], batch_size: int, **options: Any) -> DataSampler:
        """The sampler of a run.

        Args:
            prompt_ids: identity of each row of the training data, in order.
            batch_size, options: those of `DataSampler`.
        """
        raise NotImplementedError


@component
class PassRate(Curriculum):
    """Draw the prompts more often whose pass rate is near a target.

        r <- memory * r + (1 - memory) * (share of its responses with trainer.success_score)
        w  = falloff ^ |band(r) - band(target)|,   band(r) = floor(r * bands)

    A batch after the warm-up has distinct prompts, sampled in turn with probability proportional to w. A prompt that
    was not seen yet has w = 1, like one at the target. Responses that dynamic sampling leaves out count too.

    Source: weights without replacement by keys log(u) / w: Efraimidis and Spirakis 2006, Inf. Process. Lett. 97(5).
    Degenerate: falloff 1 samples all prompts uniformly; if a batch is as large as the data, it contains all prompts.

    Args:
        target: pass rate to train at. With two rewards a group says most at 0.5.
        bands: number of bands of equal width; at least 2.
        falloff: factor on the weight of a prompt for each band between it and the target, in (0, 1].
        memory: weight of the earlier pass rate when a prompt is sampled again, in [0, 1).
        warmup_epochs: initial epochs in which every prompt is used once.
    """

    target: UnitInterval = 0.5
    bands: Annotated[int, Field(ge=2)] = 5
    falloff: Annotated[float, Field(gt=0, le=1)] = 0.5
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.5
    warmup_epochs: NonNegativeInt = 1

    def band(self, rate: float) -> int:
        """Index of the band that a pass rate is in, 0 for the lowest rates."""
        return min(int(rate * self.bands), self.bands - 1)

    def weight(self, rate: float) -> float:
        """Frequency of a prompt of this pass rate, relative to one of the target's."""
        return self.falloff ** abs(self.band(rate) - self.band(self.target))

    def sampler(self, prompt_ids: Sequence[int], batch_size: int, **options: Any) -> PassRateSampler:
        return PassRateSampler(self, prompt_ids, batch_size, **options)


def sampler_of(curriculum: Curriculum | None, rows: Any, batch_size: int, **options: Any) -> DataSampler:
    """The sampler of training rows, each a mapping with `prompt_ids` where there is a curriculum."""
    if curriculum is None:
        return DataSampler(len(rows), batch_size, **options)
    return curriculum.sampler([rows[index]["prompt_ids"] for index in range(len(rows))], batch_size, **options)


class PassRateSampler(DataSampler):
    """Batches by recorded pass rates; an epoch is as many rows as the data has.

    Attributes:
        rates: pass rate by prompt id, of the prompts that were seen.
    """

    def __init__(self, curriculum: PassRate, prompt_ids: Sequence[int], batch_size: int, **options: Any):
        super().__init__(len(prompt_ids), batch_size, **options)
        self.curriculum, self.rates = curriculum, dict[int, float]()
        self._row_of = {prompt_id: row for row, prompt_id in enumerate(prompt_ids)}
        self._weights = torch.ones(len(prompt_ids), dtype=torch.float64)
        self._batches_ahead: list[Tensor] = []

    def next_batch(self) -> Tensor:
        batch = self.peek()
        del self._batches_ahead[0]
        self.epoch, self.position = self._after(self.epoch, self.position + self.batch_size)
        return batch

    def peek(self, ahead: int = 0) -> Tensor:
        """See `DataSampler.peek`; pass rates recorded later do not change the batch."""
        while len(self._batches_ahead) <= ahead:
            self._batches_ahead.append(self._draw(len(self._batches_ahead)))
        return self._batches_ahead[ahead].clone()

    def record(self, prompt_ids: Tensor, passed: Tensor) -> None:
        memory = self.curriculum.memory
        for prompt_id in prompt_ids.unique().tolist():
            rate = passed[prompt_ids == prompt_id].double().mean().item()
            before = self.rates.get(prompt_id, rate)
            self._set(prompt_id, memory * before + (1 - memory) * rate)

    @property
    def metrics(self) -> dict[str, float]:
        known, target = list(self.rates.values()), self.curriculum.band(self.curriculum.target)
        if not known:
            return {"curriculum/seen_share": 0.0}
        return {
            "curriculum/seen_share": len(known) / self.size,
            "curriculum/pass_rate": sum(known) / len(known),
            "curriculum/target_share": sum(self.curriculum.band(rate) == target for rate in known) / len(known),
        }

    def state_dict(self) -> dict[str, Any]:
        ahead = [batch.tolist() for batch in self._batches_ahead]
        return {**super().state_dict(), "rates": [[*pair] for pair in self.rates.items()], "drawn": ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({key: state[key] for key in (*STATE_KEYS, "fills") if key in state})
        self.rates, self._weights = {}, torch.ones_like(self._weights)
        for prompt_id, rate in state["rates"]:
            self._set(prompt_id, rate)
        self._batches_ahead = [torch.tensor(rows, dtype=torch.int64) for rows in state["drawn"]]

    def rewind(self) -> None:
        super().rewind()
        self._batches_ahead = []

    def _set(self, prompt_id: int, rate: float) -> None:
        self.rates[prompt_id] = rate
        self._weights[self._row_of[prompt_id]] = self.curriculum.weight(rate)

    def _draw(self, ahead: int) -> Tensor:
        """The batch `ahead` of the next one, by what is recorded now."""
        epoch, position = self.epoch, self.position
        for _ in range(ahead):
            epoch, position = self._after(epoch, position + self.batch_size)
        if epoch < self.curriculum.warmup_epochs:
            return self._batch_at(epoch, position)
        name = f"curriculum {self.seed} {epoch} {position}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
        uniform = torch.rand(self.size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return (uniform.log() / self._weights).argsort(descending=True, stable=True)[: self.batch_size]
