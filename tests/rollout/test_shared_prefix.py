"""Reading a prompt once for all of its samples gives what reading it for each of them gives."""

import pytest
import torch
from roles import start_actor

from verl.model_paths import packed_attention
from verl.models.tiny import TinyModel
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.hf_rows import WORTH_SHARING

MODEL = TinyModel(dtype="float64", hidden_size=32, intermediate_size=64, context_length=128)
WIDTH = WORTH_SHARING + 16


def long_prompts(padding: list[int]) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(WIDTH) >= torch.tensor(padding)[:, None]
    tokens = torch.randint(6, 60, (len(padding), WIDTH), generator=generator)
    numbers = torch.arange(len(padding))
    return DataProto.from_dict(
        {"prompts": tokens.masked_fill(~mask, 0), "prompt_mask": mask, "prompt_ids": numbers, "group_ids": numbers}
    )


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("padding", [[0, 0, 0], [0, 40, 5]], ids=["equal prompts", "padded prompts"])
@pytest.mark.parametrize("stops", [(), (30, 31, 32, 33, 34, 35)], ids=["together", "rows leave"])
def test_it_is_the_same_generation(padding, stops, monkeypatch):
    calls = []
    plain = packed_attention.attend_behind_prompts
    monkeypatch.setattr(packed_attention, "attend_behind_prompts", lambda *given: calls.append(1) or plain(*given))
    found = {}
    for share in (True, False):
        rollout = HFRollout(max_new_tokens=20, share_prefix=share, stop_token_ids=stops)
        found[share] = start_actor(MODEL, rollout).generate(long_prompts(padding), GenerationRequest(1, 4))
        assert bool(calls) is True
    shared, separate = found[True], found[False]
    assert torch.equal(shared["responses"], separate["responses"])
    assert len(shared["response_mask"].sum(1).unique()) > 1 or not stops
    torch.testing.assert_close(shared["rollout_log_probs"], separate["rollout_log_probs"], rtol=0, atol=1e-6)


def test_short_prompts_are_not_worth_it(prompts, monkeypatch):
    actor = start_actor(MODEL)
    actor.generate(prompts(), GenerationRequest(1, 4))  # the check of slots shares a prompt
    monkeypatch.setattr(packed_attention, "attend_behind_prompts", lambda *given: pytest.fail("shared"))
    actor.generate(prompts(), GenerationRequest(2, 4))
