"""`data=chat_task`: generated tasks for small chat models, each with its answer for a reward of
`verl.rewards.chat_rewards`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import PositiveInt

from verl.component import BuildContext, Description, component
from verl.data.base import DataSplits, PromptSource, Split, TextSource
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset

TaskName = Literal["json", "largest", "length", "reverse", "arithmetic"]
WORDS = """
Ada Ben Clara David Elena Farid Grace Hugo Ines Jonas Kira Liam Mei Nora Omar Paula Quinn Rosa Sven Tara
Athens Berlin Cairo Dublin Geneva Hanoi Lima Madrid Nairobi Oslo Paris Quito Rome Seoul Tokyo Vienna
baker carpenter doctor engineer farmer gardener judge lawyer musician nurse pilot sailor teacher writer
cat dog horse parrot rabbit turtle
bridge castle clock forest garden harbour island kitchen lantern library market mirror mountain museum orchard station
built found lost painted repaired visited photographed sold described remembered"""
NAMES, CITIES, JOBS, PETS, THINGS, DEEDS = (line.split() for line in WORDS.strip().splitlines())
USE_CALC = """You have a calculator. To use it, write one line such as calc(12*34) and nothing else. Its result follows;
then write the number alone.""".replace("\n", " ")
TIMES = ("in spring", "last winter", "before sunrise", "after the war", "on a Sunday", "in the rain", "as a child")


@component
class ChatTask(Description):
    """Problems of one kind as chats of one user message, with the column `answer`.

        json        three facts, to be given as a JSON object and nothing else
        largest     five numbers, of which the largest is asked for
        length      a short report to sum up; `answer` is the wanted number of characters, 50
        reverse     two to four words to be written from their last character to their first
        arithmetic  a sum or product of two numbers of two to four digits

    Training and held-out problems are different prompts, generated in one seeded order.

    Args:
        task: the kind.
        train_size, held_out: numbers of training and evaluation problems.
        seed: of the problems.
        system_prompt: system message; None for the chat template's, or for `arithmetic` one that describes `calc`.
    """

    task: TaskName = "json"
    train_size: PositiveInt = 4000
    held_out: PositiveInt = 256
    seed: int = 0
    system_prompt: str | None = None

    def faults(self) -> Iterator[str]:
        if self.train_size + self.held_out > 20_000:
            yield f"train_size is {self.train_size}: with {self.held_out} held out, more than 20000 problems."

    @property
    def system(self) -> str | None:
        return USE_CALC if self.system_prompt is None and self.task == "arithmetic" else self.system_prompt

    def rows(self, split: Split) -> list[dict[str, Any]]:
        """The problems of a split: `{"prompt": [{"role": "user", "content": ...}], "answer": ...}`."""
        draw, problems = random.Random(f"{self.task} {self.seed}"), {}
        while len(problems) < self.held_out + self.train_size:
            question, answer = PROBLEMS[self.task](draw)
            problems.setdefault(question, answer)
        rows = [{"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in problems.items()]
        return rows[: self.held_out] if split == "eval" else rows[self.held_out :]


@component
class ChatTaskPrompts(ChatTask, PromptSource):
    """Prompts for reinforcement learning; see `ChatTask`.

    Args:
        max_prompt_length: the most tokens of a prompt with its chat template.
    """

    max_prompt_length: PositiveInt = 160

    def columns(self) -> dict[str, frozenset[str]]:
        return {"data": frozenset({"answer"})}

    def build(self, context: BuildContext) -> DataSplits:
        options = {"max_prompt_length": self.max_prompt_length, "system_prompt": self.system}
        return DataSplits.generated(RLHFDataset, self.rows, context, **options)


@component
class ChatTaskSFT(ChatTask, TextSource):
    """Problems with their answers for supervised fine-tuning; see `ChatTask`.

    Problems of `arithmetic` are conversations: a call of the tool `calc`, its result, and the number.

    Args:
        max_length: the most tokens of problem, answer and EOS together.
    """

    max_length: PositiveInt = 256

    def build(self, context: BuildContext) -> DataSplits:
        options = {"max_length": self.max_length, "system_prompt": self.system}
        if self.task == "arithmetic":
            return DataSplits.generated(SFTDataset, self._with_calls, context, messages_key="messages", **options)
        return DataSplits.generated(SFTDataset, self.rows, context, completion_key="answer", **options)

    def _with_calls(self, split: Split) -> list[dict[str, Any]]:
        conversations = []
        for row in self.rows(split):
            left, sign, right = row["prompt"][0]["content"].rstrip("?").split()[-3:]
            call = {"role": "assistant", "content": f"calc({left}{sign}{right})"}
            result, answer = ({"role": role, "content": row["answer"]} for role in ("tool", "assistant"))
            conversations.append({"messages": [*row["prompt"], call, result, answer]})
        return conversations


def _json(draw: random.Random) -> tuple[str, str]:
    values = (draw.choice(NAMES), draw.randint(18, 80), *map(draw.choice, (CITIES, JOBS, PETS)))
    facts: dict[str, Any] = dict(zip(("name", "age", "city", "job", "pet"), values, strict=True))
    asked = {key: facts[key] for key in ["name", *draw.sample(sorted({*facts} - {"name"}), 2)]}
    listed = ", ".join(f"{key} is {json.dumps(value)}" for key, value in asked.items())
    return f"Write a JSON object with three keys: {listed}. Nothing else.", json.dumps(asked)


def _largest(draw: random.Random) -> tuple[str, str]:
    numbers = draw.sample(range(100, 1000), 5)
    listed = ", ".join(map(str, numbers))
    return f"Which is the largest of these numbers: {listed}? Answer with the number only.", str(max(numbers))


def _sentence(draw: random.Random) -> str:
    return f"{draw.choice(NAMES)} {draw.choice(DEEDS)} the {draw.choice(THINGS)} in {draw.choice(CITIES)}"


def _length(draw: random.Random) -> tuple[str, int]:
    report = " ".join(f"{draw.choice(TIMES).capitalize()}, {_sentence(draw)}." for _ in range(3))
    return f"{report} Sum this up.", 50


def _reverse(draw: random.Random) -> tuple[str, str]:
    text = " ".join(draw.sample([*NAMES, *CITIES, *JOBS, *PETS, *THINGS], draw.randint(2, 4)))
    return f"Write this text backwards, from its last character to its first: {text}", text[::-1]


def _arithmetic(draw: random.Random) -> tuple[str, str]:
    left, right = (draw.randrange(10**digits, 10 ** (digits + 1)) for digits in draw.choices((1, 2, 3), k=2))
    sign = draw.choice("+*")
    return f"What is {left} {sign} {right}?", str(left + right if sign == "+" else left * right)


PROBLEMS = {"json": _json, "largest": _largest, "length": _length, "reverse": _reverse, "arithmetic": _arithmetic}
