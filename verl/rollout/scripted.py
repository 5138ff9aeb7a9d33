"""Scripted responses, for tests and for replaying text that another system wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from verl.component import BuildContext, component
from verl.models.parallel_info import Autocast
from verl.protocol import DataProto
from verl.rollout.base import (
    ALONE,
    Capability,
    Rollout,
    RolloutEngine,
    TurnEngine,
    TurnLimits,
    TurnQueue,
    TurnResult,
    stop_tokens,
)
from verl.rollout.model_log_probs import response_log_probs
from verl.rollout.rows import refuse_wrong_responses


@component
class ScriptedRollout(Rollout):
    """Answer from a list; the log-probabilities are the model's own for that text.

    Sample i of the prompt with id p gets entry (p * num_samples + i) of the list, modulo its length.

    Args:
        texts: the responses; the end-of-text token is appended unless a response fills `max_new_tokens`.
    """

    supports: ClassVar[frozenset[Capability]] = frozenset({"stages", "experts", "modules"})

    texts: Annotated[tuple[str, ...], Field(min_length=1)]

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        for name, unset in (("top_k", 0), ("top_p", 1.0), ("min_new_tokens", 0), ("stop_token_ids", ())):
            if getattr(self, name) != unset:
                yield f"{name} is {getattr(self, name)!r}: given responses are not drawn. Leave it at {unset!r}."

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> ScriptedEngine:
        return ScriptedEngine(self, model, tokenizer, autocast)


class ScriptedEngine(RolloutEngine):
    """The running engine of `ScriptedRollout`."""

    def __init__(self, options: ScriptedRollout, model: Any, tokenizer: Any, autocast: Autocast = None):
        self.options, self.model = options, model
        self.autocast: Autocast = autocast
        self.stop_ids = stop_tokens(model, tokenizer, ()).tolist()
        limit = options.max_new_tokens
        end = self.stop_ids[:1]
        self.script = [(tokenizer(text, add_special_tokens=False).input_ids + end)[:limit] for text in options.texts]

    def turns(self, limits: TurnLimits) -> TurnEngine:
        return ScriptedTurns(self)

    def with_log_probs(self, rows: DataProto, greedy: bool) -> DataProto:
        """The model's log-probs of the rows."""
        log_probs = response_log_probs(self.model, rows, self.options.temperature, self.autocast)
        rows["rollout_log_probs"].copy_(log_probs)
        refuse_wrong_responses(rows)
        return rows


class ScriptedTurns(TurnQueue):
    """Turns of a script: turns of the same prompt get consecutive entries."""

    def __init__(self, engine: ScriptedEngine):
        super().__init__()
        self.engine = engine
        self.dtype = torch.promote_types(engine.model.dtype, torch.float32)

    def advance(self) -> list[TurnResult]:
        turns, self.queue = self.queue, []
        num_samples = 1 + max((turn.sample_id for turn in turns), default=0)
        sampled = []
        for turn in turns:
            script = self.engine.script
            line = script[(turn.prompt_id * num_samples + turn.sample_id) % len(script)]
            sampled.append(TurnResult(turn.episode, line, [0.0] * len(line), line[-1] in self.engine.stop_ids))
        return sampled
