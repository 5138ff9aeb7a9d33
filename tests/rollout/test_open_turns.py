"""Turns that are open keep keys and values of the weights that they began with."""

from __future__ import annotations

import pytest
from roles import start_actor

from verl.errors import RolloutError
from verl.rollout.base import TurnLimits, TurnRequest


@pytest.mark.parametrize("is_single", [False, True], ids=["episodes", "responses"])
def test_a_sync_with_open_turns_is_refused_and_goes_through_once_they_are_closed(is_single, model64):
    actor = start_actor(model64)
    turns = actor.sampler.engine.turns(TurnLimits(40, 0.1, is_single=is_single))
    turns.add(TurnRequest(0, [5, 6, 7], 0, 0, 0, 4))
    with pytest.raises(RolloutError, match="Weights cannot be changed while 1 turns"):
        actor.sync()
    while turns.num_pending:
        turns.advance()
    with pytest.raises(RolloutError, match="while 0 turns are being generated"):
        actor.sync()  # the slots still hold keys and values
    turns.close()
    actor.sync()


def test_no_key_of_former_weights_outlives_the_turns_it_was_kept_for(model64):
    """An old slot, planted: after new turns of the same episode, nothing is read from it."""
    import torch

    actor = start_actor(model64)
    request, drawn = TurnRequest(3, [5, 6, 7, 8, 9], 0, 0, 0, 6, greedy=True), []
    for scale in (1.0, -1.0, -1.0):  # other weights, and then the first ones again
        with torch.no_grad():
            actor.model.get_input_embeddings().weight.mul_(scale)
        actor.sync()
        turns = actor.sampler.engine.turns(TurnLimits(40, 0.1))
        turns.add(request)
        made = []
        while turns.num_pending:
            made += turns.advance()
        turns.close()
        drawn.append((made[0].tokens, made[0].log_probs))
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]
