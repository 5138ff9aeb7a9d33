"""The ready rewards: length, overlong, format, mathematical answers."""

from __future__ import annotations

import re

import pytest
import torch

from verl.component import BuildContext
from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.rewards.rules import Format, Length, MathAnswer, Overlong


def batch_of(responses, **columns):
    return DataProto.from_dict(
        tensors={"response_mask": torch.ones(len(responses), 1, dtype=torch.bool)},
        non_tensors={"prompt_text": ["q"] * len(responses), "response_text": responses, **columns},
    )


def batch_of_lengths(*lengths):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return DataProto.from_dict(tensors={"response_mask": mask})


def test_overlong_follows_equation_13_of_dapo():
    # L_max = 20480 and L_cache = 4096, as in section 4.1 of the paper
    lengths = (1, 16384, 16385, 18432, 20479, 20480, 20481, 30000)
    scored = Overlong(max_tokens=20480, buffer_tokens=4096).score(batch_of_lengths(*lengths))
    assert list(scored["score"]) == [0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1, -1]
    assert scored["token_level_scores"][3, 18431] == -0.5


def test_overlong_without_a_buffer_punishes_what_exceeds_the_limit():
    scored = Overlong(max_tokens=4, buffer_tokens=0, penalty=2.0).score(batch_of_lengths(3, 4, 5))
    assert list(scored["score"]) == [0, 0, -2]


def test_a_response_without_tokens_has_no_place_for_its_length():
    scored = Length(min_tokens=1, outside=-3.0).score(batch_of_lengths(0, 1, 2))
    assert list(scored["score"]) == [-3, 0, 0]
    assert scored["token_level_scores"].tolist() == [[0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("bounds", "scores"),
    [({"max_tokens": 2}, [0, 0, -1]), ({"min_tokens": 2}, [-1, 0, 0]), ({"min_tokens": 0}, [0] * 3)],
)
def test_length_includes_its_bounds(bounds, scores):
    assert list(Length(**bounds).score(batch_of_lengths(1, 2, 3))["score"]) == scores


def test_eos_as_the_first_token_takes_the_reward_and_no_padding_does():
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)  # the first response is its EOS alone
    batch = DataProto.from_dict(
        tensors={"response_mask": mask},
        non_tensors={"prompt_text": ["q"] * 2, "response_text": ["", "ab"]},
    )
    for reward in (Format(pattern="", correct=5.0), Length(min_tokens=3, inside=0.0, outside=5.0)):
        assert reward.score(batch)["token_level_scores"].tolist() == [[5, 0, 0, 0], [0, 0, 0, 0]]


def test_a_format_is_a_pattern_of_the_whole_response():
    reward = Format(pattern="<think>.*</think>.+")
    responses = ["<think>a\nb</think>4", " <think></think>4\n", "<think>a</think>", "x<think>a</think>4", ""]
    assert list(reward.score(batch_of(responses))["score"]) == [1, 1, 0, 0, 0]


def test_a_format_is_a_pattern_of_some_part_on_request():
    reward = Format(pattern=r"#### \d", whole=False, correct=0.5, wrong=-0.5)
    assert list(reward.score(batch_of(["so #### 4.", "####"]))["score"]) == [0.5, -0.5]


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: Format(pattern="(a"), r"pattern is '\(a': no regular expression"),
        (lambda: Format(pattern="a", correct=0), r"correct is 0\.0: must exceed wrong"),
        (lambda: Length(min_tokens=-1), r"min_tokens is -1"),
        (lambda: Length(min_tokens=3, max_tokens=2), r"max_tokens is 2: must be at least min_tokens"),
        (lambda: Length(inside=float("nan")), r"inside is nan"),
        (lambda: Overlong(max_tokens=0, buffer_tokens=0), r"max_tokens is 0"),
        (lambda: Overlong(max_tokens=4, buffer_tokens=5), r"buffer_tokens is 5: must lie in \[0, max_tokens\]"),
        (lambda: Overlong(max_tokens=4, buffer_tokens=1, penalty=-1.0), r"penalty is -1\.0"),
        (lambda: MathAnswer(correct=0), r"correct is 0\.0: must exceed wrong"),
        (lambda: MathAnswer(timeout_s=-1), r"timeout_s is -1: must be positive"),
    ],
)
def test_settings_that_cannot_be_are_faults(make, fault):
    with pytest.raises(ConfigError, match=fault):
        make()


@pytest.fixture(scope="module")
def math():
    reward = MathAnswer(num_workers=1, timeout_s=20.0, wrong=-1.0).build(BuildContext())
    yield reward
    reward.close()


GSM8K = "He has 3 bags of 24.\n3*24=<<3*24=72>>72\n#### 72"
RIGHT = [
    ("3 bags of 24 make 72.\n#### 72", GSM8K),
    ("The answer is 72.", GSM8K),
    ("#### $1,234.00", "#### 1,234"),
    (r"So it is \boxed{\frac{1}{2}}.", "0.5"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{3\sqrt{2}}", r"Adding, we get $\boxed{3\sqrt{2}}$."),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    ("-5", -5),
    ("3/4", 0.75),
]
WRONG = [
    ("#### 71", GSM8K),
    ("72 is not it, but\n#### 73", GSM8K),
    ("", GSM8K),
    ("no idea", GSM8K),
    ("#### ", GSM8K),
    (r"\boxed{2\sqrt{3}}", r"\boxed{3\sqrt{2}}"),
    ("a" * 100_000, GSM8K),
]


def test_an_answer_counts_by_its_value_however_it_is_written(math):
    responses, answers = zip(*RIGHT, *WRONG, strict=True)
    scored = math.score(batch_of(list(responses), answer=list(answers)))
    assert list(scored["score"]) == [1.0] * len(RIGHT) + [-1.0] * len(WRONG)
    assert not any(scored["reward/failed"])


@pytest.mark.parametrize("answer", [None, True, "", ["72"]])
def test_an_answer_in_the_data_that_cannot_be_read_is_wrong_and_said(answer, math, caplog):
    scored = math.score(batch_of(["72", "72"], answer=[answer, "72"]))
    assert list(scored["score"]) == [-1, 1]
    assert list(scored["reward/failed"]) == [1, 0]
    assert re.search(r"the answer in the data is .*: (expected|it holds nothing)", caplog.text)


def test_a_response_that_takes_too_long_is_wrong():
    reward = MathAnswer(num_workers=1, timeout_s=1.5).build(BuildContext())
    try:
        scored = reward.score(batch_of([r"\boxed{99999^{99999^{9}}}", "72"], answer=["98765^{98765^{9}}", "72"]))
    finally:
        reward.close()
    assert list(scored["score"]) == [0, 1]
    assert list(scored["reward/failed"]) == [1, 0]


def test_an_absent_answer_column_is_named_with_those_present(math):
    with pytest.raises(RewardError, match=r"no column 'answer', which the reward reads\. Its columns: solution"):
        math.score(batch_of(["1"], solution=["1"]))
