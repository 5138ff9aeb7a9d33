"""Turns that are open keep keys and values of the weights that they began with."""

import pytest
from roles import start_actor

from verl.errors import RolloutError
from verl.rollout.base import TurnLimits, TurnRequest
from verl.rollout.hf import HFRollout


@pytest.mark.parametrize("is_single", [False, True], ids=["episodes", "responses"])
def test_a_sync_with_open_turns_is_refused_and_goes_through_once_they_are_closed(is_single, model64):
    actor = start_actor(model64)
    turns = actor.generator.engine.turns(TurnLimits(40, 0.1, is_single=is_single))
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
        turns = actor.generator.engine.turns(TurnLimits(40, 0.1))
        turns.add(request)
        made = []
        while turns.num_pending:
            made += turns.advance()
        turns.close()
        drawn.append((made[0].tokens, made[0].log_probs))
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]


def test_a_turn_that_is_ended_draws_one_more_token_and_changes_no_other(model64):
    model, tokenizer = model64.load_causal_lm("cpu"), model64.load_tokenizer()

    def drawn(ends_at):
        turns = HFRollout(max_new_tokens=12, min_new_tokens=12).attach(model, tokenizer, seed=0).turns(TurnLimits(20))
        for episode in range(3):
            turns.add(TurnRequest(episode, [5, 6, 7 + episode], episode, 0, 0, 12))
        found, steps = {}, 0
        while turns.num_pending:
            found |= {turn.episode: turn for turn in turns.advance()}
            steps += 1
            if steps == ends_at:
                assert [len(turn.tokens) for turn in turns.open_turns()] == [ends_at] * 3
                turns.end(1)
                turns.end(7)  # is not open
        turns.close()
        return found

    whole, ended = drawn(None), drawn(4)
    assert ended[1].tokens == whole[1].tokens[:5]
    assert ended[1].log_probs == whole[1].log_probs[:5]
    assert not ended[1].is_complete
    assert [ended[episode].tokens for episode in (0, 2)] == [whole[episode].tokens for episode in (0, 2)]
