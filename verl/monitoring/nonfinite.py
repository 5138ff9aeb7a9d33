"""NonFiniteGuard: stops a run at non-finite numbers or skips an update, and dumps the batches that caused them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from verl.errors import LogProbGapError, NonFiniteError
from verl.model_paths.check import beyond_noise, chosen_rows, longest_row, row_gaps
from verl.models.parallel_info import Numerics
from verl.monitoring.batch_dump import BatchDump
from verl.monitoring.config import Monitoring
from verl.monitoring.log_prob_gap import GAP, LARGEST, Excess, GapWatch
from verl.protocol import DataProto

_log = logging.getLogger(__name__)
# What training reads of an experience. Entropies are not among it: of a token that cannot be sampled they may be nan.
TRAINED_ON = (
    "token_level_scores", "greedy_scores", "old_log_probs", "ref_log_probs", "values",
    "token_level_rewards", "advantages", "returns",
)  # fmt: skip


class NonFiniteGuard:
    """Checks the numbers of a run in the driver for values that are not finite. It does not change them.

    Args:
        settings: what to do.
        run_dir: batches are written below it.

    Attributes:
        step: current training step; set by the trainer.
        numerics: of trainer and engine, which the limit of the log-prob gap depends on; set by the trainer.
    """

    def __init__(self, settings: Monitoring, run_dir: Path):
        self.settings, self.step = settings, 0
        self.numerics: Numerics | None = None
        self._gap = None if settings.log_prob_gap is None else GapWatch(settings.log_prob_gap)
        self._longest_compared = 0  # tokens of a row
        self._anomalies = BatchDump(run_dir, settings.max_dumps)
        self._in_a_row: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def with_injected_fault(self, rows: DataProto) -> DataProto:
        """The batch of an update, which the settings may want to have a loss of nan."""
        if self.step != self.settings.plant_nan_at:
            return rows
        return rows.union(DataProto.from_dict(meta_info={"plant_nan": True}))

    def inspect(self, batch: DataProto, what: str) -> None:
        """Check the numbers that training reads, before it reads them.

        Raises:
            NonFiniteError: one is not finite, with its field, its rows, and the place of the batch.
        """
        fields = ((name, batch[name]) for name in TRAINED_ON if name in batch.batch and len(batch))
        rows = {name: (~torch.isfinite(x)).reshape(len(x), -1).any(dim=1).nonzero().flatten() for name, x in fields}
        places = [f"{name} at {_rows(wrong.tolist())}" for name, wrong in rows.items() if len(wrong)]
        if not places:
            return
        story = f"not finite: {'; '.join(places)}"
        dump = self._dump(what, story, batch)
        raise NonFiniteError(f"Step {self.step}: {story}. The weights are as they were.{_at(dump)}")

    def compare(self, rows: DataProto, plain: Callable[[DataProto, bool], DataProto]) -> None:
        """Compare the engine's log-probs with a plain forward pass of a row, before anything is trained on them.

        Some rows of the first batch are compared, and of each one with a row longer than all that were compared before.

        Args:
            rows: of a step; those of the replay buffer are left out.
            plain: gives `old_log_probs` [B T] by a forward pass of each row alone, or lengthened,
                and `is_on_policy` [B] if known.
        Raises:
            LogProbGapError: the difference is beyond the limit, which applies to each row here, and the settings stop
                (`on_excess=warn` tells it).
        """
        sampled = rows[~rows["is_replayed"]] if "is_replayed" in rows else rows
        if self._gap is None or longest_row(sampled) <= self._longest_compared:
            return
        chosen = sampled[chosen_rows(sampled)]
        scores = plain(chosen, False)
        chosen = chosen.union(scores)
        if "is_on_policy" in scores:
            chosen = chosen[scores["is_on_policy"]]
        if not len(chosen):
            return
        self._longest_compared = longest_row(sampled)
        engine, trainer, mask = (chosen[name] for name in ("rollout_log_probs", "old_log_probs", "response_mask"))
        largest = float((engine - trainer).abs().masked_fill(~mask, 0.0).max())
        gaps = row_gaps(engine, trainer, mask)
        excess = self._gap.excess_of(float(gaps.max()), largest, self.numerics)
        if excess is not None:
            gaps = beyond_noise(gaps, row_gaps(plain(chosen, True)["old_log_probs"], trainer, mask))
            excess = self._gap.excess_of(float(gaps.max()), largest, self.numerics)
        if excess is not None:
            self._tell_gap(excess, chosen, is_news=not self._gap.is_beyond)
            self._gap.is_beyond = True

    def check_update(self, role: str, metrics: Mapping[str, float], batch: Callable[[], DataProto]) -> None:
        """Look at the metrics of one optimizer step, which the engine did not make if one of them is not finite.

        Args:
            role: whose update it was.
            batch: gives its rows.
        Raises:
            NonFiniteError: the settings stop, or skipped too often.
        """
        if is_finite(metrics):
            self._in_a_row[role] = 0
            return
        story = ", ".join(f"{role}/{key} is {x}" for key, x in metrics.items() if not math.isfinite(x))
        dump = None if self._anomalies.is_full else self._dump(role, story, batch())
        if not self._skips(role, story, dump):
            raise NonFiniteError(f"Step {self.step}: {story}. The weights are as they were before.{_at(dump)}")

    def watch_gap(self, metrics: Mapping[str, float], batch: DataProto) -> None:
        """Look at the log-prob gap of a step, with its batch.

        Raises:
            LogProbGapError: the engine's log-probs are further from the trainer's than rounding explains.
        """
        if self._gap is None:
            return
        is_news = not self._gap.is_beyond
        if (excess := self._gap.add(metrics, self.numerics)) is not None:
            self._counts["log_prob_gaps"] += 1
            self._tell_gap(excess, batch, is_news)

    @property
    def stopping_gap(self) -> float:
        """The gap in nats beyond which an update is not made; infinite where no gap stops the run."""
        stops = self._gap is not None and self._gap.settings.on_excess == "stop"
        return self._gap.limit(self.numerics) if stops and self._gap is not None else math.inf

    def refuse_gap(self, metrics: Mapping[str, float], batch: Callable[[], DataProto]) -> None:
        """Stop where an actor has made no update because of the gap that is in its metrics.

        Args:
            batch: gives the rows of the update.
        Raises:
            LogProbGapError: likewise.
        """
        gap = metrics.get(GAP, 0.0)
        if self._gap is not None and gap > self.stopping_gap:
            excess = self._gap.excess_of(gap, metrics[LARGEST], self.numerics)
            assert excess is not None
            self._tell_gap(excess, batch(), is_news=True)

    def _tell_gap(self, excess: Excess, batch: DataProto, is_news: bool) -> None:
        assert self._gap is not None
        stops = self._gap.settings.on_excess == "stop"
        if not (is_news or stops):
            return
        dump = self._dump("log_prob_gap", str(excess), batch)
        message = f"Step {self.step}: {excess} {excess.causes()}{_at(dump)}"
        if stops:
            raise LogProbGapError(f"{message} The actor's weights are as they were.", excess.gap, excess.limit)
        _log.warning("%s", message)

    def take(self) -> dict[str, float]:
        """Counts since the last call, as metrics; empty for a sound step."""
        counts, self._counts = self._counts, Counter()
        return {f"safety/{name}": float(count) for name, count in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the skips in a row and the first log-prob gap, as plain values."""
        return {
            "in_a_row": dict(self._in_a_row),
            "log_prob_gap": {} if self._gap is None else self._gap.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._in_a_row = Counter(state.get("in_a_row", {}))
        if self._gap is not None:
            self._gap.load_state_dict(state.get("log_prob_gap", {}))

    def _skips(self, role: str, story: str, dump: Path | None) -> bool:
        """Whether to go on. Counts, tells, and says no to one skip too many."""
        if self.settings.on_non_finite == "stop":
            return False
        self._in_a_row[role] += 1
        if self._in_a_row[role] > self.settings.max_skips:
            _log.error("Skipped %d times in a row (trainer.safety.max_skips): stopping.", self.settings.max_skips)
            return False
        self._counts["skipped_updates"] += 1
        _log.warning("Step %d skips an update: %s.%s", self.step, story, _at(dump))
        return True

    def _dump(self, what: str, story: str, batch: DataProto) -> Path | None:
        return self._anomalies.write(f"step_{self.step}_{what}", f"Step {self.step}: {what}", story, batch)


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Whether an optimizer step with these metrics was made; see `TrainingEngine.optim_step`."""
    return all(math.isfinite(x) for x in metrics.values())


def _rows(rows: list[int]) -> str:
    shown = ", ".join(map(str, rows[:8]))
    return f"row{'s' if len(rows) > 1 else ''} {shown}{' ...' if len(rows) > 8 else ''}"


def _at(dump: Path | None) -> str:
    return "" if dump is None else f"\n  The batch: {dump}"
