"""Rewards by rules: exact match, length, overlong, format, mathematical answers; and how scores reach the tokens."""

from __future__ import annotations

import contextlib
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards.rated import batch_of

from verl.component import BuildContext
from verl.errors import RewardError
from verl.protocol import DataProto
from verl.rewards.math_rules import decimal_text, final_number, gsm8k_score, math_score, number_of
from verl.rewards.rules import ExactMatch, Format, Length, MathAnswer, Overlong


def batch_of_lengths(*lengths):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return DataProto.from_dict(tensors={"response_mask": mask})


def test_overlong_follows_equation_13_of_dapo_and_without_a_buffer_punishes_what_exceeds_the_limit():
    # L_max = 20480 and L_cache = 4096, as in section 4.1 of the paper
    lengths = (1, 16384, 16385, 18432, 20479, 20480, 20481, 30000)
    scored = Overlong(max_tokens=20480, buffer_tokens=4096).score_tokens(batch_of_lengths(*lengths))
    assert list(scored["score"]) == [0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1, -1]
    assert scored["token_level_scores"][3, 18431] == -0.5
    scored = Overlong(max_tokens=4, buffer_tokens=0, penalty=2.0).score_tokens(batch_of_lengths(3, 4, 5))
    assert list(scored["score"]) == [0, 0, -2]


def test_the_score_stands_on_the_last_token_that_the_policy_chose():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    batch = batch_of(["95", "9", "7", "", ""], answer=["95", "9", "8", "", "x"])  # the fourth is its EOS alone
    batch = batch.select([], ["prompt_text", "response_text", "answer"]).union(
        DataProto.from_dict(tensors={"response_mask": mask})
    )
    scored = ExactMatch(wrong=-1.0).score_tokens(batch)
    placed = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, -1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert scored["token_level_scores"].tolist() == placed
    assert scored["token_level_scores"].dtype == torch.float32
    assert list(scored["score"]) == [1, 1, -1, 1, -1]
    assert len(batch.union(scored).check(strict=True)) == 5
    assert ExactMatch().score_tokens(batch[[]])["token_level_scores"].shape == (0, 4)


@pytest.mark.parametrize("answer", ["95", 95, " 95 "])
def test_answers_are_texts_or_whole_numbers_and_outer_space_counts_on_request(answer):
    score = ExactMatch().score
    assert score(["p"] * 4, ["95", " 95\n", "9 5", "095"], answer=[answer] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert ExactMatch(ignore_whitespace=False).score(["p"] * 2, ["95", "95 "], answer=["95"] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("answer", [None, True, 9.5, ["95"]])
def test_an_answer_that_is_no_answer_is_named_with_its_sample(answer):
    with pytest.raises(RewardError, match=r"column 'answer' is .* at sample 1 of the batch: expected a text"):
        ExactMatch().score_tokens(batch_of(["1", "2"], answer=["95", answer]))


def test_what_the_batch_lacks_is_named_with_what_it_has(math):
    with pytest.raises(
        RewardError, match=r"answer_key is 'gold': the data has no such column\. Its columns: answer, l"
    ):
        ExactMatch(answer_key="gold").score_tokens(batch_of(["1"], answer=["1"], level=["easy"]))
    with pytest.raises(RewardError, match=r"no column 'answer', which the reward needs\. Its columns: solution"):
        math.score_tokens(batch_of(["1"], solution=["1"]))
    with pytest.raises(RewardError, match="no prompt_text and no response_text"):
        ExactMatch().score_tokens(batch_of_lengths(3, 3))


@pytest.mark.parametrize(
    ("bounds", "scores"),
    [({"max_tokens": 2}, [0, 0, -1]), ({"min_tokens": 2}, [-1, 0, 0]), ({"min_tokens": 0}, [0] * 3)],
)
def test_length_includes_its_bounds(bounds, scores):
    assert list(Length(**bounds).score_tokens(batch_of_lengths(1, 2, 3))["score"]) == scores


def test_a_format_is_a_pattern_of_the_whole_response_or_of_some_part_on_request():
    reward = Format(pattern="<think>.*</think>.+")
    responses = ["<think>a\nb</think>4", " <think></think>4\n", "<think>a</think>", "x<think>a</think>4", ""]
    assert list(reward.score_tokens(batch_of(responses))["score"]) == [1, 1, 0, 0, 0]
    reward = Format(pattern=r"#### \d", whole=False, correct=0.5, wrong=-0.5)
    assert list(reward.score_tokens(batch_of(["so #### 4.", "####"]))["score"]) == [0.5, -0.5]


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
    ("<think>12, no</think><answer>72</answer> of 3 bags", GSM8K),
    (r"\boxed{1} is wrong.<answer>\fbox{72}.</answer>", GSM8K),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("-5", -5),
    ("3/4", 0.75),
]
WRONG = [
    ("#### 71", GSM8K),
    ("72 is not it, but\n#### 73", GSM8K),
    ("", GSM8K),
    ("no idea", GSM8K),
    ("#### ", GSM8K),
    (r"<answer>72</answer>\boxed{71}", GSM8K),
    (r"\boxed{2\sqrt{3}}", r"\boxed{3\sqrt{2}}"),
    ("a" * 100_000, GSM8K),
]


def test_an_answer_counts_by_its_value_however_it_is_written(math):
    responses, answers = zip(*RIGHT, *WRONG, strict=True)
    scored = math.score_tokens(batch_of(list(responses), answer=list(answers)))
    assert list(scored["score"]) == [1.0] * len(RIGHT) + [-1.0] * len(WRONG)
    assert not any(scored["reward/failed"])


@pytest.mark.parametrize("answer", [None, True, "", ["72"]])
def test_an_answer_in_the_data_that_cannot_be_read_is_wrong_and_said(answer, math, caplog):
    scored = math.score_tokens(batch_of(["72", "72"], answer=[answer, "72"]))
    assert list(scored["score"]) == [-1, 1]
    assert list(scored["reward/failed"]) == [1, 0]
    assert re.search(r"the answer in the data is .*: (expected|it cannot be parsed)", caplog.text)


@pytest.mark.slow
def test_a_response_that_takes_too_long_is_wrong():
    with contextlib.closing(MathAnswer(num_workers=1, timeout_s=1.0).build(BuildContext())) as reward:
        scored = reward.score_tokens(batch_of([r"\boxed{99999^{99999^{9}}}", "72"], answer=["98765^{98765^{9}}", "72"]))
    assert list(scored["score"]) == [0, 1]
    assert list(scored["reward/failed"]) == [1, 0]


# Spellings of answers: those of a line are the same answer, those of two lines are not

SAME = [
    [r"\$18.90", "$18.90", "$18.9", "18.90", r"\$18.9", "US$18.90", "18.90 dollars", r"18.90\text{ dollars}"],
    ["1,234", "1234", "1{,}234", r"1\,234", "$1,234", r"\$1{,}234", "1234.0", "1\u202f234", "1 234", "+1,234"],
    ["-5", "\u22125", "-$5", "$-5", "- 5", r"-\$5", "\u20135", "-5.", "-5.0", "$-5$"],
    ["5", "5.", "005", "$5", "$5$", r"\(5\)", "5\u20ac", "**5**", "+5"],
    ["7", "7.00"],
    ["1/2", r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", ".5", "0.5", "\u00bd", "50%", r"50\%", "1 / 2", "50 percent"],
    ["-1/2", r"-\frac{1}{2}", "-0.5", r"-\dfrac12", "\u22121/2"],
    ["1 1/2", r"1\frac{1}{2}", "3/2", "1.5", "1\u00bd"],
    ["1,234,567.89", "1234567.89", "$1,234,567.89"],
    ["12.5%", r"12.5\%", "12.5 %", "0.125", "1/8"],
]
READABLE = [
    "5-7", "5 - 7", "5 to 7", "[5,7]", "(5,7)", "(1, 2)", "1e5", "2^{10}", r"3\sqrt{2}", r"\frac{\sqrt{3}}{2}",
    "x^2+2x+1", "x=5", r"x \in [1,2]", r"[0,\infty)", r"(-\infty,2)\cup(3,\infty)", r"\{1,2,3\}", "1,2,3", "Monday",
    r"\text{(C)}", r"2\pi", r"30^\circ", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "3:2", "10:30", r"\pm 3",
    "2+3i", "n!",
    r"-1 \leq x < 4", r"3 \times 10^8", r"\frac{x+1}{x-1}", "Yes", "8:00 AM", r"\left[0, 1\right)", "m=3, b=2", "3,14",
]  # fmt: skip
NUMBERS = [line for line in SAME if line[0] != "12.5%"]


def scored(response: str, answer: object) -> float:
    return math_score("q", response, answer, 1.0, 0.0)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("answer", [*(spelling for line in SAME for spelling in line), *READABLE])
def test_a_readable_answer_equals_itself_however_it_is_marked(answer):
    for gold in (answer, f"A solution.\n#### {answer}", rf"So it is $\boxed{{{answer}}}$."):
        for response in (f"#### {answer}", rf"\boxed{{{answer}}}", rf"Thus $\boxed{{{answer}}}$.", answer):
            assert scored(response, gold) == 1.0, (gold, response)


@pytest.mark.parametrize("line", SAME, ids=lambda line: line[0])
def test_spellings_of_one_number_are_equal_and_those_of_others_are_not(line):
    for spelling in line:
        assert scored(f"#### {spelling}", line[0]) == scored(rf"\boxed{{{line[0]}}}", spelling) == 1.0, spelling
        for other in SAME:
            if other is not line:
                assert scored(f"#### {spelling}", other[0]) == 0.0, other[0]


@pytest.mark.parametrize("line", NUMBERS, ids=lambda line: line[0])
def test_the_number_of_a_gsm8k_answer_is_read_in_every_spelling(line):
    for spelling in line:
        if "%" in spelling or "percent" in spelling:
            continue
        for form in (spelling, f"#### {spelling}", rf"\boxed{{{spelling}}}", f"It is so.\n#### {spelling}\n"):
            assert gsm8k_score(["q"], [form], [line[0]]) == [1.0], form
            assert gsm8k_score(["q"], [line[0]], [form]) == [1.0], form
        for other in NUMBERS:
            if other is not line:
                assert gsm8k_score(["q"], [f"#### {spelling}"], [other[0]]) == [0.0], other[0]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(-(10**9), 10**9),
    st.integers(0, 99),
    st.sampled_from(["", "$", r"\$", "\u20ac", "\u00a3"]),
    st.booleans(),
)
def test_any_sum_of_money_is_read_as_what_it_is(whole, cents, currency, separates):
    digits = f"{abs(whole):{',' if separates else ''}}.{cents:02d}"
    wanted = Fraction(digits.replace(",", "")) * (-1 if whole < 0 else 1)
    for text in (f"{'-' if whole < 0 else ''}{currency}{digits}", f"{currency}{'-' if whole < 0 else ''}{digits}"):
        assert number_of(text) == final_number(f"#### {text}") == final_number(f"It is {text}.") == wanted
        assert number_of(decimal_text(wanted)) == wanted


@pytest.mark.parametrize(
    "text",
    ["5-7", "5 to 7", "5 \u2013 7", "#### 5-7", "5 or 7", "#### 5:30", "3:2", "2+3", "#### 3 x 4", "10^3", "1,5",
     "1.2.3", "2023-05-07", "1/2/3", "1/0", "9" * 5000, "", "####", "none"],
)  # fmt: skip
def test_what_is_no_single_number_is_not_taken_for_one_of_its_parts(text):
    assert final_number(text) is None
    for part in ("5", "7", "-7", "3", "1", "2"):
        assert gsm8k_score(["q"], [text], [part]) == [0.0]


def test_gsm8k_reads_the_column_as_the_data_set_has_it_and_names_an_answer_without_a_number():
    assert gsm8k_score(["q"] * 3, ["It makes 72.", "#### 72", "71"], [GSM8K] * 3) == [1.0, 1.0, 0.0]
    assert gsm8k_score(["q"] * 2, ["72", "0.5"], [72, 0.5]) == [1.0, 1.0]
    for answer in ("seventy-two", "5-7", "", "#### ", "from 5 he makes 72"):
        with pytest.raises(ValueError, match="the answer in the data is .* at sample 1 of the batch: expected a n"):
            gsm8k_score(["q"] * 2, ["72", "72"], ["72", answer])
    with pytest.raises(ValueError, match="expected a text or a number"):
        gsm8k_score(["q"], ["72"], [None])


def test_answers_in_several_boxes_are_one_answer_and_the_last_of_others_counts():
    assert scored(r"$\boxed{1}$ and $\boxed{2}$", r"\{1,2\}") == 1.0
    assert scored(r"$\boxed{1}$ and $\boxed{2}$", "2") == 0.0
    assert scored(r"First \boxed{1}. Then, of this, \boxed{2}", "2") == 1.0
    assert scored("#### 5\n\nNote: this is 3 less than 8", "5") == 1.0
    assert gsm8k_score([""], ["<answer>5</answer> is 3 less than 8"], ["5"]) == [1.0]
