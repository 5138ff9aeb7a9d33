"""The watch on `rollout/log_prob_gap_nats`: whether the engine that samples computes what the trainer does.

    gap of the step  <=  max(limit of the type, min(factor * first gap, CAP_NATS))

The gap is known before anything is trained on the rows where the trainer computes log-probs before the update; where
the update itself does (one optimizer step for each batch), after its backward passes and before its optimizer step.

Before the first update, and before that of a batch with a row longer than all before it, the gap of single rows from a
plain forward pass of each is held to the same limit: trainer and engine may be wrong in the same way.

The first gap is that of the first step within the limit of the type, so that a run that is wrong from its first step
on never becomes its own measure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from verl.component import Description, component
from verl.models.parallel_info import Numerics

GAP, LARGEST = "rollout/log_prob_gap_nats", "rollout/log_prob_gap_max_nats"

# Nats per token, mean over a step, that rounding may make at temperature 1. Seen in sound runs: 1e-7 to 1e-5 in
# float32, 0.003 to 0.03 in bfloat16, dense models and mixtures of experts. float16 and tf32 have 3 bits more than
# bfloat16.
LIMITS = {"float64": 1e-3, "float32": 5e-3, "tf32": 0.02, "float16": 0.02, "bfloat16": 0.1}
NARROWER = 0.2  # of any other type: weights or activations of 8 bits and less
# The most that a large first gap or a low temperature can raise the limit to. Faults that nothing else saw (a window,
# positions, another scaling) began at 0.5.
CAP_NATS = 0.3


@component
class LogProbGapLimit(Description):
    """Limit of the gap between log-probs of the sampling engine and of the trainer, and the action beyond it.

    What is compared is the mean over the tokens of a step, in rows sampled by the very weights that score them.
    The largest is a metric alone: in a mixture of experts a single token may differ by nats through rounding.

    Args:
        on_excess: `stop` ends the run with the likely cause; `warn` tells it, once until the gap has been within the
            limit again.
        limit_nats: of the mean; null by the coarser of the types that trainer and engine compute in: 0.001 for float64,
            0.005 for float32, 0.02 for float16 and TF32, 0.1 for bfloat16, 0.2 for narrower ones; over a temperature
            below 1, up to 0.3.
        factor: times the first step's own mean is within the limit too, up to 0.3 nats.
    """

    on_excess: Literal["stop", "warn"] = "stop"
    limit_nats: PositiveFloat | None = None
    factor: Annotated[float, Field(ge=1)] = 5.0


@dataclass(frozen=True)
class Excess:
    """A gap beyond its limit.

    Attributes:
        gap, largest: of the step, mean and largest.
        limit: for the mean.
        reason: what the limit is made of.
        first: mean of the first sound step; None where there was none yet.
        numerics: of trainer and engine.
    """

    gap: float
    largest: float
    limit: float
    reason: str
    first: float | None
    numerics: Numerics | None

    def __str__(self) -> str:
        first = "" if self.first is None else f", and the first step had {self.first:.3g}"
        return (
            f"{GAP} is {self.gap:.3g} (largest {self.largest:.3g}): the engine that sampled and the trainer give the "
            f"same tokens other log-probs, where {self.limit:.3g} may be rounding ({self.reason}){first}."
        )

    def causes(self) -> str:
        """Likely causes, the likeliest first, and what to do."""
        engine = "the engine" if self.numerics is None else self.numerics.engine_kind
        type_name = "was expected" if self.numerics is None else self.numerics.engine
        stale = f"{engine} did not take over the last weights (see sync/... and docs/rollout.md)"
        model = f"{engine} holds another model, or reads another tokenizer's ids"
        drawing = "it samples by another temperature, or tells log-probs after top_k, top_p or a penalty"
        masks = (
            "one of the two computes positions, attention windows, padding or packed rows otherwise (try "
            "actor.packing=off, and rollout=hf)"
        )
        rounding = (
            f"rounding: {engine} computes in a narrower type than {type_name}, or the model amplifies it (try "
            "actor.autocast=null)"
        )
        likely = [model, drawing, masks, rounding]
        if self.gap <= LIMITS["bfloat16"]:
            likely.sort(key=lambda cause: cause is not rounding)
        likely = [*likely, stale] if self.first is None else [stale, *likely]
        when = "It was so from the start" if self.first is None else "It was not so at first"
        return (
            f"{when}. Likely causes, the likeliest first: {'; '.join(likely)}. Training on such rows learns from "
            "probabilities that nothing was sampled by. Where the difference is intended: algorithm.correction, and "
            "trainer.safety.log_prob_gap.on_excess=warn or a higher limit_nats."
        )


class GapWatch:
    """Compares the gap of each step with its limit.

    Attributes:
        is_beyond: the last gap was beyond the limit, and has been told.
    """

    def __init__(self, settings: LogProbGapLimit):
        self.settings = settings
        self.first: float | None = None
        self._of: list[Any] | None = None  # what that one was computed with
        self.is_beyond = False

    def add(self, metrics: Mapping[str, float], numerics: Numerics | None) -> Excess | None:
        """Look at a step; a gap that is not there, or not finite, is none: the latter has a check of its own.

        Args:
            numerics: of trainer and engine; None where they are not known.
        """
        gap = metrics.get(GAP)
        if gap is None or not math.isfinite(gap):
            return None
        self._start_over_if_other(numerics)
        excess = self.excess_of(gap, metrics.get(LARGEST, math.nan), numerics)
        self.is_beyond = excess is not None
        if excess is None and self.first is None:
            self.first = gap
        return excess

    def excess_of(self, gap: float, largest: float, numerics: Numerics | None) -> Excess | None:
        """The excess of a gap that no step is measured by; None within the limit."""
        limit, reason = self._limit(numerics)
        return None if gap <= limit else Excess(gap, largest, limit, reason, self.first, numerics)

    def state_dict(self) -> dict[str, Any]:
        """The first gap and what it was computed with, and whether the last one was beyond the limit; plain values."""
        return {"first_nats": self.first, "of": self._of, "is_beyond": self.is_beyond}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; from nothing, the next step is the first."""
        self.first, self._of = state.get("first_nats"), state.get("of")
        self.is_beyond = state.get("is_beyond", False)

    def limit(self, numerics: Numerics | None) -> float:
        """The limit of the next gap that `add` gets, in nats."""
        self._start_over_if_other(numerics)
        return self._limit(numerics)[0]

    def _start_over_if_other(self, numerics: Numerics | None) -> None:
        """A run resumed with another engine or type has another rounding."""
        of = None if numerics is None else list(dataclasses.astuple(numerics))
        if of != self._of:
            self.first, self._of = None, of

    def _limit(self, numerics: Numerics | None) -> tuple[float, str]:
        limit, reason = limit_of(numerics)
        if self.settings.limit_nats is not None:
            limit, reason = self.settings.limit_nats, "trainer.safety.log_prob_gap.limit_nats"
        by_first = 0.0 if self.first is None else min(self.settings.factor * self.first, CAP_NATS)
        if by_first > limit:
            return by_first, f"{self.settings.factor:g} times the first step's, at most {CAP_NATS:g}"
        return limit, reason


def limit_of(numerics: Numerics | None) -> tuple[float, str]:
    """The limit for the less precise of the two dtypes, and its description.

    Dividing logits by a temperature below 1 divides their rounding too.
    """
    names, temperature = ("bfloat16",), 1.0
    if numerics is not None:
        names, temperature = (numerics.trainer, numerics.engine), min(1.0, numerics.temperature)
    limit, name = max((LIMITS.get(name, NARROWER), name) for name in names)
    if temperature < 1:
        return max(limit, min(limit / temperature, CAP_NATS)), f"{name} at temperature {temperature:g}"
    return limit, name
