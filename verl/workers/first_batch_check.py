"""A check of a role's first batch: some of its rows, as the role computes them, against a plain forward pass of each.

What was found on a small copy of the model (`verl.model_paths`) is checked again with the model itself, in its
type, with its weights and the rows of the run: the longest, the shortest, and some that share a prompt.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from verl.engines.engine import Compute, TrainingEngine
from verl.errors import ConfigError
from verl.model_paths.paths import PLAINER, Scoring
from verl.protocol import DataProto

GROUP = 3  # rows that share a prompt
# Mean difference over the tokens of a row, in nats or in the units of a value: rounding stays below, and another
# window, position or text beside a row is far above
BOUNDS = {torch.float64: 1e-4, torch.float32: 5e-3, torch.float16: 0.05, torch.bfloat16: 0.15}

_log = logging.getLogger(__name__)


class FirstBatchCheck:
    """Checks the first batch of a role, and switches its engine to a simpler execution path if the current one is
    wrong.

    Args:
        name: where the configuration describes the model.
        engine: that runs it.
        compute: what the role computes per token; the first of its tensors is compared.
        plain: the same by the model's own forward pass alone.
    """

    def __init__(self, name: str, engine: TrainingEngine, compute: Compute, plain: Compute):
        self.name, self.engine, self.compute, self.plain = name, engine, compute, plain
        self.is_done = False

    def look(self, batch: DataProto) -> None:
        """Compare, once; every process takes part with rows of its own, if it has some.

        Raises:
            ConfigError: no way of running the model gives what a plain forward pass of a row gives.
        """
        if self.is_done:
            return
        self.is_done = True
        rows = batch[chosen_rows(batch)]
        wanted = self._first(self.engine.infer(rows, self.plain, alone=True))
        first = self.engine.parallel.most(PLAINER.index(self.engine.paths(rows).scoring))
        worst = 0.0
        for scoring in PLAINER[first:]:
            if scoring != PLAINER[first]:
                self.engine.limit(scoring)
            difference = self.difference(self._first(self.engine.infer(rows, self.compute)), wanted, rows)
            if difference <= self._bound():
                self._tell(PLAINER[first], scoring, worst)
                return
            worst = max(worst, difference)
            if self.engine.parallel.context is not None:
                raise ConfigError(
                    f"{self.name} is a {type(self.engine.model).__name__}: rows of the first batch have different "
                    f"results when processes share their tokens ({worst:.2g} on average). Set sharding.cp=1."
                )
        raise ConfigError(
            f"{self.name} is a {type(self.engine.model).__name__}: rows of the first batch have different results "
            f"in a batch and alone ({worst:.2g} on average), however they are run. Choose another attention "
            "implementation or another model."
        )

    def _tell(self, before: Scoring, scoring: Scoring, worst: float) -> None:
        if scoring != before:
            words = (way.replace("_", " ") for way in (before, scoring))
            _log.warning(
                "%s is a %s: as %s batches, rows of the first batch have different results than each row alone "
                "(%.2g on average). From here on rows are run as %s batches.",
                self.name,
                type(self.engine.model).__name__,
                next(words),
                worst,
                next(words),
            )

    def difference(self, found: Tensor | None, wanted: Tensor | None, rows: DataProto) -> float:
        """The mean over the tokens of a row, the largest of all rows and processes."""
        own = 0.0
        if found is not None and wanted is not None and bool(rows["response_mask"].any()):
            mask = rows["response_mask"]
            counts = mask.sum(dim=1).clamp_min(1)
            own = float(((found - wanted).abs().double().masked_fill(~mask, 0.0).sum(dim=1) / counts).max())
            if not torch.isfinite(wanted[mask]).all():
                own = 0.0  # weights that are not finite: the first step tells of those
        return self.engine.parallel.most(int(min(own if own == own else 1e6, 1e6) * 1e9)) / 1e9

    def _bound(self) -> float:
        engine = self.engine
        kind = next(iter(engine.parameters.values())).dtype
        narrow = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(engine.autocast), kind)
        return max(BOUNDS.get(kind, 0.15), BOUNDS.get(narrow, 0.15))

    @staticmethod
    def _first(found: dict[str, Tensor]) -> Tensor | None:
        return next(iter(found.values()), None)


def chosen_rows(batch: DataProto) -> list[int]:
    """The longest row, the shortest, and up to `GROUP` that share the prompt of the longest; none of none."""
    if not len(batch):
        return []
    attention, mask = batch["attention_mask"], batch["response_mask"]
    lengths = attention.sum(dim=1).masked_fill(~mask.any(dim=1).to(attention.device), 0)
    if not int(lengths.max()):
        return [0]
    longest, width = int(lengths.argmax()), attention.shape[1] - mask.shape[1]
    present = lengths.masked_fill(lengths == 0, int(lengths.max()) + 1)
    prompts = torch.cat([batch["input_ids"][:, :width], attention[:, :width]], dim=1)
    group = (prompts == prompts[longest]).all(dim=1).nonzero()[:, 0].tolist()
    return sorted({longest, int(present.argmin()), *group[:GROUP]})
