"""Exact match, and how scores reach the tokens."""

from __future__ import annotations

import pytest
import torch

from verl.errors import RewardError
from verl.protocol import DataProto
from verl.rewards.rules import ExactMatch


def batch_of(responses, answers, mask, **columns):
    return DataProto.from_dict(
        tensors={"response_mask": torch.tensor(mask, dtype=torch.bool).reshape(len(responses), -1)},
        non_tensors={
            "prompt_text": [f"{index}=" for index in range(len(responses))],
            "response_text": responses,
            "answer": answers,
            **columns,
        },
    )


def test_the_score_stands_on_the_last_token_that_the_policy_chose():
    mask = [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]]
    scored = ExactMatch().score_tokens(batch_of(["95", "9", "7"], ["95", "9", "8"], mask))
    assert scored["token_level_scores"].tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert scored["token_level_scores"].dtype == torch.float32
    assert list(scored["score"]) == [1.0, 1.0, 0.0]


def test_a_row_without_response_tokens_gets_nothing_on_them():
    scored = ExactMatch(wrong=-1.0).score_tokens(batch_of(["", "5"], ["", "6"], [[0, 0], [1, 1]]))
    assert scored["token_level_scores"].tolist() == [[0, 0], [0, -1]]
    assert list(scored["score"]) == [1.0, -1.0]


def test_what_comes_back_joins_the_batch():
    batch = batch_of(["95"], ["95"], [[1]])
    assert set(ExactMatch().score_tokens(batch).batch) == {"token_level_scores"}
    assert len(batch.union(ExactMatch().score_tokens(batch)).check(strict=True)) == 1


def test_a_batch_of_no_rows_gets_no_scores():
    batch = batch_of(["1", "2"], ["1", "2"], [[1, 1], [1, 1]])[[]]
    scored = ExactMatch().score_tokens(batch)
    assert scored["token_level_scores"].shape == (0, 2)
    assert len(scored["score"]) == 0


@pytest.mark.parametrize("answer", ["95", 95, " 95 "])
def test_answers_are_texts_or_whole_numbers_and_outer_space_does_not_count(answer):
    score = ExactMatch().score
    assert score(["p"] * 4, ["95", " 95\n", "9 5", "095"], answer=[answer] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_white_space_counts_on_request():
    assert ExactMatch(ignore_whitespace=False).score(["p"] * 2, ["95", "95 "], answer=["95"] * 2) == [1.0, 0.0]


def test_an_absent_answer_column_is_named_with_those_present():
    with pytest.raises(
        RewardError, match=r"answer_key is 'solution': the data has no such column\. Its columns: answer, level"
    ):
        ExactMatch(answer_key="solution").score_tokens(batch_of(["1"], ["1"], [[1]], level=["easy"]))


@pytest.mark.parametrize("answer", [None, True, 9.5, ["95"]])
def test_an_answer_that_is_no_answer_is_named_with_its_sample(answer):
    answers = ["95", answer]
    with pytest.raises(RewardError, match=r"column 'answer' is .* at sample 1 of the batch: expected a text"):
        ExactMatch().score_tokens(batch_of(["1", "2"], answers, [[1], [1]]))


def test_a_batch_without_texts_is_refused():
    batch = DataProto.from_dict(tensors={"response_mask": torch.ones(2, 3, dtype=torch.bool)})
    with pytest.raises(RewardError, match="no prompt_text and no response_text"):
        ExactMatch().score_tokens(batch)
