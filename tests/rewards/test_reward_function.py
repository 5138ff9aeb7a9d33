"""Reward functions of the user: found before a run, called with what they name, and blamed by line and sample."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import sys
from textwrap import dedent

import numpy as np
import pytest
import torch
from cases import exhaustive
from rewards.rated import batch_of

from verl.component import BuildContext
from verl.errors import ConfigError, RewardError
from verl.rewards.function import CallableReward, RewardFunction

ANSWERS = ["0", "1", "2", "3", "4"]


@pytest.fixture
def batch():
    return batch_of([f"response {index}" for index in range(5)], answer=ANSWERS)


@pytest.fixture
def written(tmp_path):
    """Write a reward file, whose first line is empty, and describe its `my_reward`."""

    def write(source, **kwargs):
        path = tmp_path / "reward.py"
        path.write_text("\n" + dedent(source).strip() + "\n")
        return RewardFunction(path=f"{path}:my_reward", kwargs=kwargs)

    return write


def returning(result):
    def my_reward(prompts, responses, **columns):
        return result

    return RewardFunction.wrap(my_reward)


def refusal(reward, batch):
    with pytest.raises(RewardError) as refused:
        reward.score_tokens(batch)
    return str(refused.value)


def test_a_function_in_a_file_sees_texts_columns_and_kwargs_and_is_the_producer_of_the_scores(written, batch):
    reward = written(
        """
        def my_reward(prompts, responses, answer, bonus=0.0):
            assert prompts[3] == "prompt 3" and responses[3] == "response 3"
            return [float(a) + bonus for a in answer]
        """,
        bonus=0.5,
    ).build(BuildContext())
    scored = reward.score_tokens(batch)
    assert list(scored["score"]) == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert scored["token_level_scores"][:, 1].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert str(scored.producer("token_level_scores")) == "my_reward() at line 2 in reward.py"


def test_a_function_in_a_module_is_found_without_importing_its_package(tmp_path, monkeypatch, batch):
    package = tmp_path / "my_rewards_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sums.py").write_text("def my_reward(prompts, responses, **columns):\n    return [1] * len(responses)\n")
    monkeypatch.syspath_prepend(tmp_path)
    described = RewardFunction(path="my_rewards_pkg.sums:my_reward")
    assert "my_rewards_pkg" not in sys.modules
    assert list(described.build(BuildContext()).score_tokens(batch)["score"]) == [1.0] * 5
    assert "my_rewards_pkg" not in sys.modules  # but in the process that calls it


def test_describing_a_function_runs_none_of_its_file(written, tmp_path):
    written(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef my_reward(prompts, responses): return []")
    assert not (tmp_path / "ran").exists()


def test_two_files_of_one_name_are_two_modules(tmp_path, batch):
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        source = f"def my_reward(prompts, responses): return [{value}] * len(responses)"
        (tmp_path / str(value) / "reward.py").write_text(source)
    made = [RewardFunction(path=f"{tmp_path}/{value}/reward.py:my_reward").build(BuildContext()) for value in (1, 2)]
    assert [reward.score_tokens(batch)["score"][0] for reward in made] == [1.0, 2.0]


@pytest.mark.parametrize(
    "result",
    [
        [0, 1, 2, 3, 4],
        (0.0, 1.0, 2.0, 3.0, 4.0),
        np.arange(5),
        np.arange(5, dtype=np.float32),
        torch.arange(5),
        torch.arange(5, dtype=torch.bfloat16),
        torch.arange(5.0, requires_grad=True),
        [np.float32(0), torch.tensor(1.0), 2, np.int64(3), np.array(4)],
        range(5),
    ],
)
def test_any_sequence_of_numbers_is_a_reward(result, batch):
    assert list(returning(result).score_tokens(batch)["score"]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "result", [[True, False] * 2 + [True], torch.tensor([1, 0, 1, 0, 1]).bool(), np.arange(5) % 2 == 0]
)
def test_truth_values_count_as_one_and_zero(result, batch):
    assert list(returning(result).score_tokens(batch)["score"]) == [1, 0, 1, 0, 1]


async def awaited(prompts, responses):
    await asyncio.sleep(0)
    return [1 / (int(text[-1]) - 5) for text in responses]


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_an_async_function_is_awaited_where_a_loop_runs_too_and_traced_to_its_line(in_a_loop, batch):
    async def notebook():
        return CallableReward(awaited).score_tokens(batch)

    scored = asyncio.run(notebook()) if in_a_loop else CallableReward(awaited).score_tokens(batch)
    assert list(scored["score"]) == [-1 / 5, -1 / 4, -1 / 3, -1 / 2, -1]
    batch.non_tensor_batch["response_text"][1] = "response 5"
    message = refusal(CallableReward(awaited), batch)
    assert "return [1 / (int(text[-1]) - 5) for text in responses]" in message


def test_a_list_of_coroutines_is_awaited_concurrently(batch):
    arrived = []

    async def one(text):
        arrived.append(text)
        while len(arrived) < 5:  # one after another, the first would wait for ever
            await asyncio.sleep(0)
        return float(text[-1])

    assert list(CallableReward(lambda prompts, responses: list(map(one, responses))).score_tokens(batch)["score"]) == [
        0, 1, 2, 3, 4
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("result", "found", "sample"),
    [
        ([0.0, 1.0, float("nan"), 3.0, 4.0], "nan", 2),
        ([0.0, 1.0, 2.0, 3.0, float("-inf")], "-inf", 4),
        (torch.tensor([0.0, float("nan"), 0.0, 0.0, 0.0]), "nan", 1),
        ([0.0, 1.0, 2.0, 1e300, 4.0], "1e+300", 3),
        ([0.0, {}, 2.0, 3.0, 4.0], "{} of type dict", 1),
        ([0.0, "1", 2.0, 3.0, 4.0], "'1' of type str", 1),
        ([0.0, [1.0], 2.0, 3.0, 4.0], "[1.0] of type list", 1),
        ([0.0, 1j, 2.0, 3.0, 4.0], "1j of type complex", 1),
        ([0.0, 1.0, 2.0], "3 items", 3),
        (None, "None", None),
        ([0.0] * 6, "6 items", None),
        (torch.zeros(5, 1), "a tensor of shape [5, 1]", None),
        (torch.tensor(1.0), "a tensor of shape []", None),
        (np.zeros((5, 2)), "an array of shape [5, 2]", None),
        (1.0, "1.0 of type float", None),
        ({"acc": [1.0] * 5}, "a dict, {'acc': [1.0, 1.0, 1.0, 1.0, 1.0]}", None),
        ("01234", "a str, '01234'", None),
        (iter(range(5)), "<range_iterator", None),
    ],
)
def test_a_bad_result_is_named_and_a_bad_score_with_its_sample_and_texts(result, found, sample, batch):
    message = refusal(returning(result), batch)
    assert "Expected: 5 finite numbers, one for each response" in message
    assert f"Found: {found}" in message
    texts = f"Sample: {sample}, prompt 'prompt {sample}', response 'response {sample}'"
    assert (texts if sample is not None else "") in message
    assert ("Sample: " in message) == (sample is not None)
    assert "Source: my_reward() at line" in message
    assert "in test_reward_function.py" in message


def test_a_function_that_raises_is_reported_with_its_own_line(written, batch):
    reward = written(
        """
        def half(text):
            return 1 / (int(text) - 3)

        def my_reward(prompts, responses, answer):
            return [half(a) for a in answer]
        """
    ).build(BuildContext())
    with pytest.raises(RewardError) as refused:
        reward.score_tokens(batch)
    message = str(refused.value)
    assert "Found: ZeroDivisionError: division by zero" in message
    assert "Raised at line 3: return 1 / (int(text) - 3)" in message
    assert "Source: my_reward() at line 5 in reward.py" in message


def test_long_texts_are_shortened(batch):
    for name in ("prompt_text", "response_text"):
        batch.non_tensor_batch[name][:] = "a" * 5000
    message = refusal(returning(["1"] * 5), batch)
    assert len(message) < 600
    assert "aaa ... aaa" in message


def test_a_function_may_change_what_it_is_given(batch):
    CallableReward(lambda prompts, responses, answer: [float(answer.pop(0)) for _ in responses]).score_tokens(batch)
    assert list(batch["answer"]) == ANSWERS
    info = batch_of(["a", "b"], extra_info=[{"uses": 0}, {"uses": 0}])
    CallableReward(lambda prompts, responses, extra_info: [x.pop("uses") for x in extra_info]).score_tokens(info)
    assert list(info["extra_info"]) == [{"uses": 0}, {"uses": 0}]


def test_a_column_that_the_function_needs_and_the_data_lacks_is_named(batch):
    def my_reward(prompts, responses, solution):
        return [1.0] * 5

    message = refusal(CallableReward(my_reward), batch)
    assert "no column 'solution' in the data. Its columns: answer" in message


def test_a_callable_object_is_a_reward_and_what_cannot_be_called_as_one_is_refused(batch):
    class Constant:
        def __call__(self, prompts, responses):
            return [2.0] * len(responses)

    assert list(RewardFunction.wrap(Constant()).score_tokens(batch)["score"]) == [2.0] * 5
    for function in (None, 3, lambda texts, others: [1.0], lambda prompts: [1.0]):
        with pytest.raises(RewardError):
            CallableReward(function)  # type: ignore


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("my_reward", "expected `package.module:function` or `file.py:function`."),
        ("rewards.py:", "expected `package.module:function`"),
        ("a b:my_reward", "expected `package.module:function`"),
        ("absent.py:my_reward", "absent.py is not a file."),
        ("no_such_package_here.sub:my_reward", "there is no module no_such_package_here."),
        ("json.absent:my_reward", "there is no module json.absent."),
        ("json.decoder:absent", "decoder.py defines no absent."),
    ],
)
def test_a_path_that_leads_nowhere_is_a_fault_of_the_configuration(path, fault):
    with pytest.raises(ConfigError) as refused:
        RewardFunction(path=path)
    assert str(refused.value).startswith(f"path is {path!r}: ")
    assert fault in str(refused.value)


@pytest.mark.parametrize(
    ("source", "kwargs", "fault"),
    [
        ("def my_rewards(prompts, responses): pass", {}, "reward.py defines no my_reward. Did you mean my_rewards?"),
        ("x = 1", {}, "reward.py defines no my_reward. Its functions: none."),
        ("def my_reward(prompts responses): pass", {}, "reward.py is not valid Python, line 2"),
        ("def my_reward(prompts): pass", {}, "has no argument `responses`"),
        ("def my_reward(prompts, responses, bonus): pass", {"bonsu": 1}, "kwargs.bonsu: my_reward() at line 2"),
        ("def my_reward(prompts, responses, bonus): pass", {"bonsu": 1}, "Did you mean bonus?"),
        (
            "def my_reward(prompts, responses): pass",
            {"prompts": 1},
            "kwargs.prompts: the function already receives an argument of this name",
        ),
    ],
)
def test_a_file_without_a_fitting_function_is_a_fault_of_the_configuration(written, source, kwargs, fault):
    with pytest.raises(ConfigError) as refused:
        written(source, **kwargs)
    assert fault in str(refused.value)


@pytest.mark.parametrize(
    "source",
    [
        "from json import *",
        "from json import loads as my_reward",
        "import functools\nmy_reward = functools.partial(print)",
        "try:\n    import absent\nexcept ImportError:\n    def my_reward(prompts, responses): return []",
        "if True:\n    def my_reward(prompts, responses, **columns): return []",
        "class my_reward: pass",
    ],
)
def test_a_name_that_may_be_a_function_is_no_fault(written, source):
    assert written(source).path.endswith("reward.py:my_reward")


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import no_such_package_here\ndef my_reward(prompts, responses): return []", "ModuleNotFoundError: No module"),
        ("my_reward = 3", "my_reward is 3, which is not callable"),
    ],
)
def test_a_file_without_a_function_that_can_be_imported_is_refused_with_its_cause(source, fault, written):
    with pytest.raises(ConfigError, match=fault):
        written(source).build(BuildContext())


# A batch is one call in a process of its own, which can be killed


@pytest.mark.slow
@pytest.mark.parametrize("hang", ["while True: pass", *exhaustive("time.sleep(1000)")])
def test_a_function_of_the_batch_that_hangs_is_ended_at_its_deadline_and_its_line_named(hang, written, batch):
    described = written(
        f"""
        import time

        def my_reward(prompts, responses, answer):
            if answer[0] != "hang":
                return [1.0] * len(answer)
            {hang}
        """
    )
    with contextlib.closing(dataclasses.replace(described, timeout_s=1.0).build(BuildContext())) as reward:
        assert list(reward.score_tokens(batch)["score"]) == [1.0] * 5
        hanging = copy.deepcopy(batch)
        hanging.non_tensor_batch["answer"][:] = "hang"
        with pytest.raises(RewardError) as ended:
            reward.score_tokens(hanging)
        assert "Found: no answer within timeout_s, which is 1: its process was killed" in str(ended.value)
        assert "It was at line 7, in my_reward()" in str(ended.value)
        assert "Source: my_reward() at line 4 in reward.py" in str(ended.value)
        assert list(reward.score_tokens(batch)["score"]) == [1.0] * 5  # by another process


def test_a_function_of_the_batch_that_ends_its_process_ends_nothing_else(written, batch):
    reward = written("import os\ndef my_reward(prompts, responses): os._exit(3)").build(BuildContext())
    with pytest.raises(RewardError, match="the process ended with exit status 3"):
        reward.score_tokens(batch)
    reward.close()


@pytest.mark.slow
def test_what_a_function_of_the_batch_gives_may_be_anything_that_can_be_sent(written, batch):
    source = "import {module}\ndef my_reward(prompts, responses): return {value}"
    for module, value in (
        ("numpy", "numpy.arange(5)"),
        ("torch", "torch.arange(5) / 2"),
        ("torch", "[torch.ones(())] * 5"),
    ):
        reward = written(source.format(module=module, value=value)).build(BuildContext())
        assert len(reward.score_tokens(batch)["score"]) == 5
        reward.close()
    reward = written("def my_reward(prompts, responses): return (1.0 for _ in prompts)").build(BuildContext())
    with pytest.raises(RewardError, match="Found: <generator object .* of type generator"):
        reward.score_tokens(batch)
    reward.close()


def test_a_batch_has_a_minute_and_a_sample_ten_seconds_unless_something_else_is_said(written):
    described = written("def my_reward(prompts, responses): return []")
    assert described.call_timeout_s == 60.0
    assert dataclasses.replace(described, timeout_s=2.5).call_timeout_s == 2.5
    assert RewardFunction(path="verl.rewards.math_rules:math_score", per_sample=True).call_timeout_s == 10.0
