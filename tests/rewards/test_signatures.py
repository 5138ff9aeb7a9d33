"""Reward functions as verl and TRL write them, results with further columns, and None for no reward."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from verl.component import BuildContext
from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.rewards.base import missing_columns
from verl.rewards.function import CallableReward, RewardFunction
from verl.rewards.rules import ExactMatch

CHAT = [{"role": "user", "content": "1+1="}]


def batch_of(**columns):
    texts = {"prompt_text": ["1+1=", "2+2="], "response_text": ["2", "5"], **columns}
    arrays = {name: np.fromiter(values, dtype=object) for name, values in texts.items()}
    return DataProto.from_dict({"response_mask": torch.ones(2, 2, dtype=torch.bool)}, arrays)


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    assert data_source in ("sums", None), data_source
    assert extra_info is None or extra_info["index"] in (0, 1)
    return {"score": weight * (solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}
"""
VERL_COLUMNS = {
    "data_source": ["sums"] * 2,
    "reward_model": [{"style": "rule", "ground_truth": "2"}, {"style": "rule", "ground_truth": "4"}],
    "extra_info": [{"index": 0}, {"index": 1}],
}


@pytest.mark.slow
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("columns", [VERL_COLUMNS, {"ground_truth": ["2", "4"]}, {"answer": ["2", "4"]}])
def test_a_function_of_verl_gets_its_arguments(per_sample, columns, tmp_path):
    (tmp_path / "score.py").write_text(VERL)
    kwargs = {"weight": 2.0, "extra_info": {"index": 1}}  # settings come before columns
    described = RewardFunction(path=f"{tmp_path}/score.py:compute_score", per_sample=per_sample, kwargs=kwargs)
    assert not list(missing_columns(described, columns, "rows"))
    with contextlib.closing(described.build(BuildContext())) as reward:
        scored = reward.score_tokens(batch_of(**columns))
    assert list(scored["score"]) == [2.0, 0.0]
    assert list(scored["reward/acc"]) == [1.0, 0.0]
    assert list(scored["reward_pred"]) == ["2", "5"]


@pytest.mark.parametrize("columns", [VERL_COLUMNS, {"answer": ["2", "4"]}])
def test_the_ground_truth_of_verl_s_data_is_a_column_for_rules_too(columns):
    rule = ExactMatch(answer_key="ground_truth")
    assert not list(missing_columns(rule, columns, "rows"))
    assert list(rule.score_tokens(batch_of(**columns))["score"]) == [1.0, 0.0]


def test_a_column_that_is_missing_or_a_setting_that_does_not_exist_is_named_before_the_function_is_called(tmp_path):
    (tmp_path / "score.py").write_text(f"{VERL}\ndef of_trl(completions, answer): return [0.0 for _ in completions]\n")
    of_verl, of_trl = (RewardFunction(path=f"{tmp_path}/score.py:{name}") for name in ("compute_score", "of_trl"))
    for described, column in ((of_verl, "ground_truth"), (of_trl, "answer")):
        assert any(column in fault for fault in missing_columns(described, {"label": ["2"]}, "rows"))
    with pytest.raises(RewardError, match="ground_truth"):
        of_verl.build(BuildContext()).score_tokens(batch_of())
    with pytest.raises(ConfigError, match="weigth"):
        RewardFunction(path=f"{tmp_path}/score.py:compute_score", kwargs={"weigth": 1.0}).build(BuildContext())


@pytest.mark.parametrize("signature", ["completions", "completions, **kwargs", "completions, answer, prompts"])
def test_a_function_of_trl_gets_texts_of_text_prompts(signature, tmp_path):
    (tmp_path / "score.py").write_text(f"def f({signature}):\n    return [float(len(c)) for c in completions]\n")
    with contextlib.closing(RewardFunction(path=f"{tmp_path}/score.py:f").build(BuildContext())) as reward:
        assert list(reward.score_tokens(batch_of(answer=["2", "4"]))["score"]) == [1.0, 1.0]


def test_a_function_of_trl_gets_messages_of_chats():
    def f(prompts, completions, answer, **kwargs):
        assert prompts == [CHAT, CHAT]
        return [
            float(c[0]["content"] == a) if c[0]["role"] == "assistant" else 9.0 for c, a in zip(completions, answer)
        ]

    batch = batch_of(prompt_messages=[CHAT, CHAT], answer=["2", "4"])
    assert list(CallableReward(f).score_tokens(batch)["score"]) == [1.0, 0.0]


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("source", "scores"),
    [
        ("def f(completions, **kwargs): return [0.5 for c in completions]", [0.5, 0.5]),
        ("def f(completions, **kwargs): return [None for c in completions]", [None, None]),
        ("def f(prompt, response): return {'score': None, 'n': 2}", [None, None]),
    ],
)
def test_a_function_of_a_batch_may_be_called_for_each_sample_and_a_sample_may_have_no_reward(source, scores, tmp_path):
    (tmp_path / "score.py").write_text(source)
    with contextlib.closing(
        RewardFunction(path=f"{tmp_path}/score.py:f", per_sample=True).build(BuildContext())
    ) as reward:
        assert list(reward.score_tokens(batch_of())["score"]) == scores


@pytest.mark.parametrize("columns", [{"reward_model": [{"ground_truth": "2"}, None]}, {"answer": ["2", "4"]}])
def test_a_function_of_verl_may_be_given_as_an_object(columns):
    from verl.trainer.api.from_objects import reward_from_object

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        assert not kwargs
        return float(solution_str == ground_truth)

    described = reward_from_object(compute_score)
    assert not list(missing_columns(described, columns, "rows"))
    assert list(missing_columns(described, {"label": ["2"]}, "rows"))
    assert list(described.build(BuildContext()).score_tokens(batch_of(**columns))["score"]) == [1.0, 0.0]


def test_functions_of_our_own_signature_with_such_columns_stay_as_they_are():
    def f(prompts, responses, completions):
        return [float(a == b) for a, b in zip(responses, completions)]

    assert list(CallableReward(f).score_tokens(batch_of(completions=["2", "4"]))["score"]) == [1.0, 0.0]


RESULTS = [
    ([1.0, None], [1.0, None], {}),
    ([{"score": 1, "n": 3}, {"score": None}], [1.0, None], {"reward/n": [3.0, np.nan]}),
    ({"score": [1.0, 0.0], "kind": ["a", None]}, [1.0, 0.0], {"reward_kind": ["a", None]}),
    ({"score": [1.0, 0.0], "zero": [0, 0]}, [1.0, 0.0], {"reward/zero": [0.0, 0.0]}),
    ([{"score": True, "kind": [1]}, 0.5], [1.0, 0.5], {"reward_kind": ["[1]", None]}),
]  # fmt: skip


@pytest.mark.parametrize(("result", "scores", "others"), RESULTS)
def test_results_may_be_none_or_carry_columns(result, scores, others):
    scored = CallableReward(lambda prompts, responses: result).score_tokens(batch_of())
    assert list(scored["score"]) == scores
    for name, values in others.items():
        assert [repr(x) for x in scored[name]] == [repr(x) for x in values]
    assert bool(scored["token_level_scores"].isfinite().all())


@pytest.mark.parametrize("result", [{"acc": [1.0, 0.0]}, {"score": [1.0, 0.0], "mean": [1, 2]}, [{"acc": 1}, 2.0]])
def test_mappings_without_a_score_and_columns_named_as_metrics_are_refused(result):
    with pytest.raises(RewardError):
        CallableReward(lambda prompts, responses: result).score_tokens(batch_of())
