r"""Rules for mathematical answers, as functions of text. Imports little, since worker processes import it.

`gsm8k_score` compares the final number of a response; `math_score` compares answers by value: 0.5, 1/2 and \frac{1}{2}.
Both take as the final answer what follows the last `####`, or the content of the last `\boxed{}`, and look for either
in the last `<answer>...</answer>` where there is one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

MARK = "####"
_MAX_DIGITS = 300  # longer numbers are not answers, and parsing them takes quadratic time


def gsm8k_score(
    prompts: Sequence[str], responses: Sequence[str], answer: Sequence[Any], needs_mark: bool = False
) -> list[float]:
    r"""1 for a response with the correct final number, else 0. Used as `reward=function
    reward.path=verl.rewards.math_rules:gsm8k_score`.

    Args:
        prompts: unused.
        responses: B texts.
        answer: B numbers, such as `1,250`, or solutions that end with `#### 1,250` or `\boxed{1250}`.
        needs_mark: accept only a number after `####` or in a box.
    Raises:
        ValueError: an answer in the data is not a number.
    """
    return [
        float(final_number(text, needs_mark) == _gold_number(truth, index))
        for index, (text, truth) in enumerate(zip(responses, answer, strict=True))
    ]


def final_number(text: str, needs_mark: bool = False) -> Fraction | None:
    r"""The final number of a text; None if there is none, or an expression of several, such as `5-7` or `2+3`.

    This is the first number after the last `####`, after the last `=` of that line if it has one; else the last number
    in the last `\boxed{}`; without either the last number of the text. `1/2` and `1 1/2` are one number each. Currency
    and percent signs and units are ignored.
    """
    text = _tagged_answer(text)
    marked = _marked_answer(text)
    if marked is None:
        if needs_mark:
            return None
        if (number := number_of(text)) is not None:
            return number
        numbers = _numbers(_plain_text(text))
        return numbers[-1].value if numbers else None
    numbers = _numbers(_plain_text(marked).rpartition("=")[2], is_marked=True)
    return numbers[0].value if numbers else None


def number_of(text: str) -> Fraction | None:
    """The value of a text that is a single number, with or without currency sign and unit; else None."""
    numbers = _numbers(_plain_text(text), is_marked=True)
    return numbers[0].value if len(numbers) == 1 and numbers[0].starts_the_text else None


def decimal_text(number: Fraction) -> str:
    """A number as text: `72`, `18.9`, or `1/3` if no finite decimal is exact. `number_of` is the inverse."""
    remaining = number.denominator
    for factor in (2, 5):
        while remaining % factor == 0:
            remaining //= factor
    if remaining != 1:
        return str(number)
    return f"{Decimal(number.numerator) / Decimal(number.denominator):f}"


def _gold_number(truth: Any, index: int) -> Fraction:
    _refuse_other_types(truth)
    text = str(truth)
    number = number_of(text) if _marked_answer(text) is None else final_number(text)
    if number is None:
        raise ValueError(
            f"the answer in the data is {truth!r:.200} at sample {index} of the batch: expected a number, such as "
            f"'1,250', or a solution that ends with '{MARK} 1,250'"
        )
    return number


def math_score(prompt: str, response: str, answer: str | float, correct: float, wrong: float) -> float:
    """`correct` if the final answer of a response equals `answer` in value, else `wrong`.

    Raises:
        ValueError: `answer` cannot be parsed as mathematics.
    """
    from math_verify import parse, verify

    _refuse_other_types(answer)
    gold, answered = _Answer.of(str(answer), is_alone=True), _Answer.of(_tagged_answer(response), is_alone=False)
    # math-verify's time-outs are off: they cannot interrupt code that never returns to Python.
    gold_values = parse(gold.readable, parsing_timeout=0)
    if gold.number is None and not gold_values:
        raise ValueError(f"the answer in the data is {answer!r}: it cannot be parsed as mathematics")
    if answered.text and (answered.text == gold.text or gold.is_same_number(answered)):
        return correct
    given_values = parse(answered.readable, parsing_timeout=0)
    return correct if given_values and verify(gold_values, given_values, timeout_seconds=0) else wrong


def _refuse_other_types(answer: Any) -> None:
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"the answer in the data is {answer!r}: expected a text or a number")


@dataclass(frozen=True)
class _Answer:
    """The final answer in a text.

    Attributes:
        text: normalised text; answers with equal texts are equal.
        number: the value if the answer is a single number, else None.
        is_percentage: whether it is a percentage; `50%` equals both 50 and 0.5.
        readable: the text that math-verify parses.
    """

    text: str
    number: Fraction | None
    is_percentage: bool
    readable: str

    @classmethod
    def of(cls, text: str, *, is_alone: bool) -> _Answer:
        """Extract the answer of a text. `is_alone`: without a mark, the whole text is the answer."""
        box, tail = _last_box(text), _after_mark(text)
        marked = _marked_answer(text)
        expression = text if marked is None else marked
        plain = _plain_text(expression)
        numbers = _numbers(plain, is_marked=True)
        is_one_of_several = box is not None and _SEVERAL_BOXES.search(text) is not None
        number = numbers[0] if len(numbers) == 1 and numbers[0].is_whole_text and not is_one_of_several else None
        if number is not None and number.value is not None:
            readable = rf"\boxed{{{number.value.numerator}/{number.value.denominator}}}"
        elif box is not None:  # with the text around it: "\boxed{1} and \boxed{2}" is one answer
            readable = _without_currency(text if tail is None else tail)
        elif tail is None and (not is_alone or re.search(r"(?<!\\)\$|\\\(|\\\[", text)):
            readable = _without_currency(text)
        else:
            readable = rf"\boxed{{{_plain_text(expression, keeps_words=True)}}}" if plain else ""
        value = None if number is None else number.value
        is_percentage = number is not None and number.is_percentage
        spelling = re.sub(r"\s+", " ", _plain_text(text) if is_one_of_several else plain)
        spelling = re.sub(r"\s*([^\w\s])\s*", r"\1", spelling).strip()  # spaces only between letters or digits
        return cls(spelling, value, is_percentage, readable)

    def is_same_number(self, other: _Answer) -> bool:
        if self.number is None or other.number is None:
            return False
        if self.is_percentage == other.is_percentage:
            return self.number == other.number
        percentage, plain = (self, other) if self.is_percentage else (other, self)
        return plain.number in (percentage.number, percentage.number / 100)  # type: ignore[operator]


def _tagged_answer(text: str) -> str:
    """The content of the last `<answer>` of a response, unless it is empty or a mark follows it; else all of it."""
    answer, end, rest = text.rpartition("<answer>")[2].partition("</answer>")
    return answer if end and answer.strip() and _marked_answer(rest) is None else text


def _marked_answer(text: str) -> str | None:
    """The marked answer: the last box, or the first line after the last `####`; None without a mark."""
    if (box := _last_box(text)) is not None:
        return box
    if (tail := _after_mark(text)) is None:
        return None
    return next((line for line in map(str.strip, tail.splitlines()) if line), "")


def _after_mark(text: str) -> str | None:
    _, mark, tail = text.rpartition(MARK)
    return tail if mark else None


def _last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{}` with balanced braces, after the last `####` if there is one."""
    tail = _after_mark(text)
    text = text if tail is None else tail
    for box in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for brace in re.finditer(r"\\[{}\\]|[{}]", text[box.end() :]):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return text[box.end() :][: brace.start()]
    return None


_SEVERAL_BOXES = re.compile(  # joined to the box before: "\boxed{1} and \boxed{2}"
    r"\}\s*\$*\s*(?:,|\band\b|\bor\b|\\text\s*\{\s*(?:and|or)\s*\})(?:\s|,|\$|\band\b|\bor\b)*\\(?:boxed|fbox)\s*\{"
    r"(?:(?!\\(?:boxed|fbox)\s*\{).)*$",
    re.DOTALL,
)

# Different spellings of one symbol

_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"))
_VULGAR = {
    "\u00bd": "1/2", "\u2153": "1/3", "\u2154": "2/3", "\u00bc": "1/4", "\u00be": "3/4", "\u2155": "1/5",
    "\u215b": "1/8", "\u215c": "3/8", "\u215d": "5/8", "\u215e": "7/8",
}  # fmt: skip
_SPACE_COMMAND = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad\b|~|[\u00a0\u2009\u202f]")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?[\d,.]+)\s*\}|(\d))\s*(?:\{\s*([\d,.]+)\s*\}|(\d))")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


def _plain_text(text: str, *, keeps_words: bool = False) -> str:
    r"""Replace LaTeX and Unicode forms of currency, thousands separators, minus and fractions by ASCII.

    Args:
        text: the text to normalise.
        keeps_words: keep `\text{cm}`, by which math-verify distinguishes a unit from a product of variables.
    """
    text = text.translate(_MINUS).replace("{,}", ",").replace(r"\%", "%").replace(r"\$", "$")
    text = re.sub(r"(?<=\d)(?:\\[,;:!]|[\u00a0\u2009\u202f'])(?=\d{3}(?!\d))", ",", text)
    text = _SPACE_COMMAND.sub(" ", text).replace(r"\left", "").replace(r"\right", "")
    for sign, fraction in _VULGAR.items():
        text = text.replace(sign, f" {fraction}")
    text = _FRACTION.sub(lambda found: f" {found[1] or found[2]}/{found[3] or found[4]}", text)
    text = re.sub(r"(?<![\w)}\]])- +(?=\d+/\d)", "-", text)  # minus of a LaTeX fraction
    text = (text if keeps_words else _TEXT.sub(r"\1", text)).strip().strip("*`").strip()
    for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(text) > len(start + end) and text.startswith(start) and text.endswith(end):
            text = text[len(start) : -len(end)].strip()
    return re.sub(r"\.$", "", text).strip()


def _without_currency(text: str) -> str:
    """Remove currency signs; math-verify parses neither an escaped dollar sign nor a minus before one."""
    text = re.sub(r"-\s*\\?\$\s*(?=[\d.])", "-", text.translate(_MINUS))
    return text.replace(r"\$", "")


# Numbers in a text

_CURRENCY = r"(?:(?:US|C|A|NZ|HK|S)?\$|[€£¥₹₩₽₱]|(?:USD|EUR|GBP|INR|CAD|AUD|Rs\.?)(?=\s?[\d.]))"
_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d+)(?![\d])"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>(?<![\w)}}\]%])[-+](?:\s*(?={_CURRENCY}))?)?{_CURRENCY}?\s?(?P<sign_after>-(?=[\d.]))?"
    rf"(?:(?P<whole>\d+)\s+(?P<mixed_over>\d+)\s?/\s?(?P<mixed_under>\d+)(?![\d,.]*\d)"
    rf"|(?P<over>{_DECIMAL})\s?/\s?(?P<under>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL})(?P<exponent>[eE][-+]?\d{{1,3}}(?!\w))?)"
    rf"\s?(?:(?:{_CURRENCY}|dollars?\b|euros?\b|pounds?\b)(?!\s?\d))?\s?(?P<percent>%|percent\b|per cent\b)?"
)
# Signs that join two numbers into one expression: a range, a sum, a date, a ratio, a list, a decimal comma.
_JOINS = re.compile(r"(?:\s*(?:[-+*/:^\u00d7\u00b7\u00f7x]|\\times|\\cdot|\\div)\s*|[,.]|\s*(?:to|or|and|through)\s+)$")


@dataclass(frozen=True)
class _TextNumber:
    """A number in a text; `value` is None if it is part of a range, a sum, a date, a ratio or a list."""

    value: Fraction | None
    is_percentage: bool
    starts_the_text: bool
    is_whole_text: bool


def _numbers(text: str, *, is_marked: bool = False) -> list[_TextNumber]:
    """The numbers of a text in order; an expression of several numbers is one item without a value.

    Args:
        text: the text to search.
        is_marked: the text is an answer, so that spaces after a minus and between thousands are accepted.
    """
    if is_marked:
        text = re.sub(r"^(\W*?[-+])\s+(?=[\d.])", r"\1", text)
        if re.fullmatch(r"\D*?\d{1,3}(?: \d{3})+(?:\.\d+)?\D*", text):
            text = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", ",", text)
    numbers: list[_TextNumber] = []
    last: re.Match[str] | None = None
    for match in _NUMBER.finditer(text):
        sign = (match["sign"] or "").strip()  # of the second number in `5 -7`, which joins them
        is_joined = last is not None and _JOINS.match(text[last.end() : match.start()] + sign)
        if is_joined:
            numbers[-1] = _TextNumber(None, False, numbers[-1].starts_the_text, False)
        else:
            starts = not re.search(r"\w", text[: match.start()])
            remaining = text[match.end() :]
            is_number = not re.match(r"[,.:/]?\d|\s*[*\u00d7^]\s*[\d(]", remaining)
            is_whole = not text[: match.start()].strip() and not remaining.strip(" .")
            value = _value(match) if is_number else None
            numbers.append(_TextNumber(value, match["percent"] is not None, starts, is_whole and is_number))
        last = match
    return numbers


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > _MAX_DIGITS:
        return None
    sign = -1 if "-" in (found["sign"] or "") + (found["sign_after"] or "") else 1
    if found["whole"]:
        under = int(found["mixed_under"])
        return sign * (int(found["whole"]) + Fraction(int(found["mixed_over"]), under)) if under else None
    if found["over"]:
        under = _decimal(found["under"])
        return sign * _decimal(found["over"]) / under if under else None
    return sign * _decimal(found["decimal"] + (found["exponent"] or ""))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


for _name in ("math_verify", "math_verify.parser", "math_verify.grader"):  # they log a warning at every call
    logging.getLogger(_name).setLevel(logging.ERROR)
