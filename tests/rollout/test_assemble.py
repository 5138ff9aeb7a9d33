"""What every engine draws is checked where it becomes rows, engines of the user's own among them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from roles import start_actor

from verl.component import MaybeInfinite, component
from verl.errors import RolloutError
from verl.rollout.base import GenerationRequest, Rollout, RolloutEngine, TurnEngine, TurnLimits, TurnQueue, TurnResult
from verl.rollout.rows import assemble

LENGTHS = [3, 1, 2, 3, 2, 1, 3, 3]  # of two samples of four prompts


@component
class OwnRollout(Rollout):
    """An engine as a user would write it, which is wrong about one token: the second of prompt 2, sample 0."""

    log_prob: MaybeInfinite = -1.0
    token: int = 5

    def attach(self, model: Any, tokenizer: Any, seed: int, autocast: Any = None, context: Any = None) -> OwnEngine:
        return OwnEngine(self)


class OwnEngine(RolloutEngine):
    def __init__(self, options: OwnRollout):
        self.options = options

    def turns(self, limits: TurnLimits) -> TurnEngine:
        return OwnTurns(self.options)


class OwnTurns(TurnQueue):
    def __init__(self, options: OwnRollout):
        super().__init__()
        self.options = options

    def advance(self) -> list[TurnResult]:
        turns, self.queue = self.queue, []
        made = [TurnResult(turn.episode, [5] * n, [-1.0] * n, True) for turn, n in zip(turns, LENGTHS, strict=True)]
        made[4].tokens[1], made[4].log_probs[1] = self.options.token, self.options.log_prob
        return made


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"log_prob": math.nan}, "has the log-prob nan, and"),
        ({"log_prob": math.inf}, "has the log-prob inf, and"),
        ({"log_prob": -math.inf}, "has the log-prob -inf, and"),
        ({"log_prob": -9999.0}, "has the log-prob -9999, and"),
        ({"log_prob": 0.5}, "has the log-prob 0.5, and"),
        ({"token": 10**6}, "id 1000000, is not a token: the model knows 0 to"),
        ({"token": -100}, "id -100, is not a token"),
    ],
)
def test_an_engine_of_the_users_own_is_refused_with_prompt_sample_and_token(wrong, why, model32, prompts):
    actor = start_actor(model32, OwnRollout(**wrong))
    with pytest.raises(
        RolloutError, match="The rollout engine's response to prompt 2, sample 0: token 2 of 2"
    ) as refused:
        actor.generate(prompts(), GenerationRequest(0, 2))
    assert why in str(refused.value)
    assert "1 such of 18 tokens" in str(refused.value)


@pytest.mark.parametrize("log_prob", [0.0, 9e-4, 1e-6, -80.0, -5000.0])
def test_what_may_be_a_log_prob_is_taken(log_prob, model32, prompts):
    rows = start_actor(model32, OwnRollout(log_prob=log_prob)).generate(prompts(), GenerationRequest(0, 2))
    assert float(rows["rollout_log_probs"][4, 1]) == pytest.approx(log_prob)
    assert not rows["rollout_log_probs"].isnan().any()


def test_no_rows_and_rows_without_a_token_are_rows(prompts):
    none = torch.zeros(0, 3)
    assert len(assemble(prompts()[:0], 2, none.long(), none.bool(), none, pad_id=0)) == 0
    empty = torch.zeros(8, 3)
    rows = assemble(prompts(), 2, empty.long(), empty.bool(), torch.full((8, 3), math.nan), pad_id=0)
    assert rows["responses"].shape == (8, 0)
