"""Packing: every token stands once in its place, and what predicts a response token is the token before it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.ops.packing import PackedRows, own_tokens, pack

WIDTH, PROMPT = 5, 4


@st.composite
def rows(draw):
    """Lengths, prompts and masks of a few rows; responses may be empty, and masks have holes."""
    count = draw(st.integers(1, 9))
    prompt_of = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    length_of = torch.tensor(draw(st.lists(st.integers(1, PROMPT), min_size=4, max_size=4)))
    responses = torch.tensor(draw(st.lists(st.integers(0, WIDTH), min_size=count, max_size=count)))
    holes = torch.tensor(draw(st.lists(st.booleans(), min_size=count * WIDTH, max_size=count * WIDTH)))
    mask = (torch.arange(WIDTH) < responses[:, None]) & ~(holes.view(count, WIDTH) & draw(st.booleans()))
    return length_of[prompt_of], responses, prompt_of, mask


def flat_of(row: int, position: int, prompt_length: int) -> int:
    """Where a row's token stands among the flattened rows."""
    return row * (PROMPT + WIDTH) + PROMPT - prompt_length + position


@given(rows(), st.booleans())
def test_each_predictor_is_the_token_before_the_one_it_predicts(made, share):
    prompts, responses, prompt_of, mask = made
    packing = pack(prompts, responses, prompt_of, mask, PROMPT, share)
    found = packing.tokens[packing.predictors.index].tolist()
    for (row, t), token in zip(mask.nonzero().tolist(), found, strict=True):
        p = int(prompts[row])
        twins = [r for r in range(len(prompts)) if prompt_of[r] == prompt_of[row]] if share and t == 0 else [row]
        assert token in [flat_of(r, p + t - 1, p) for r in twins]


@given(rows(), st.booleans())
def test_no_token_stands_twice_and_a_shared_prompt_stands_once(made, share):
    prompts, responses, prompt_of, mask = made
    packing = pack(prompts, responses, prompt_of, mask, PROMPT, share)
    assert len(packing.tokens.unique()) == len(packing.tokens)
    shown = {int(o): int(p) for o, p in zip(prompt_of, prompts, strict=True)}
    expected = sum(shown.values()) if share else int(prompts.sum())
    assert len(packing.tokens) == expected + int(own_tokens(responses).sum())


@given(rows(), st.booleans())
def test_what_each_token_sees_is_its_own_row_up_to_itself(made, share):
    prompts, responses, prompt_of, mask = made
    packing = pack(prompts, responses, prompt_of, mask, PROMPT, share)
    for token, seen in visible(packing).items():
        assert len(seen) == int(packing.positions[token]) + 1
        assert sorted(int(packing.positions[k]) for k in seen) == list(range(len(seen)))
        owners = {int(packing.tokens[k]) // (PROMPT + WIDTH) for k in seen}
        assert len({int(prompt_of[row]) for row in owners}) == 1


def visible(packing: PackedRows) -> dict[int, list[int]]:
    """Token -> tokens that it sees, read off the blocks as attention reads them."""
    seen, first_query, first_key, slots = {}, 0, 0, packing.slots()
    for block in slots.blocks:
        for i in range(block.count):
            keys = slots.keys.index[first_key + i * block.keys :][: block.keys].tolist()
            prefix = keys[: int(block.prefix_lengths[i])]
            for j in range(block.queries):
                slot = first_query + i * block.queries + j
                token = int(slots.queries.index[slot])
                if int(slots.out.index[token]) == slot:
                    seen[token] = prefix + keys[block.prefix : block.prefix + j + 1]
        first_query += block.count * block.queries
        first_key += block.count * block.keys
    assert len(seen) == len(packing.tokens)
    return seen
