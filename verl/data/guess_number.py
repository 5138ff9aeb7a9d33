"""The game of guessing a number from 1 to `highest`: prompts with the secret, and games that show its form."""

from __future__ import annotations

import random

from pydantic import PositiveInt

from verl.component import BuildContext, component
from verl.data.base import DataSplits, PromptSource, Split, TextSource
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset

EOS = "<eos>"


@component
class GuessNumberPrompts(PromptSource):
    """One prompt for each secret number, with the column `secret`.

    Args:
        highest: numbers are 1 to `highest`.
        repeats: rows of each number in an epoch.
        max_prompt_length: the most tokens of a prompt; a token is a character.
    """

    highest: PositiveInt = 15
    repeats: PositiveInt = 40
    max_prompt_length: PositiveInt = 16

    def columns(self) -> dict[str, frozenset[str]]:
        return {"data": frozenset({"secret"})}

    def build(self, context: BuildContext) -> DataSplits:
        rows = [{"prompt": f"1-{self.highest}?", "secret": number} for number in range(1, self.highest + 1)]
        config = {"max_prompt_length": self.max_prompt_length}
        return DataSplits(
            train=RLHFDataset.from_rows(rows * self.repeats, tokenizer=context.tokenizer, config=config),
            eval=RLHFDataset.from_rows(rows, tokenizer=context.tokenizer, config=config),
        )


@component
class GuessNumberSFT(TextSource):
    """Games with random guesses: they teach the format of the game, but no strategy.

    Args:
        highest: numbers are 1 to `highest`.
        max_guesses: guesses of a game.
        train_size, held_out: numbers of texts, each ending with a guess.
        seed: of the games.
        max_length: the most tokens of a text.
    """

    highest: PositiveInt = 15
    max_guesses: PositiveInt = 4
    train_size: PositiveInt = 4000
    held_out: PositiveInt = 200
    seed: int = 0
    max_length: PositiveInt = 64

    def rows(self, split: Split) -> list[dict[str, str]]:
        chosen = random.Random(f"guess number warm start/{split}/{self.seed}")
        rows = []
        for _ in range(self.train_size if split == "train" else self.held_out):
            secret, text = chosen.randint(1, self.highest), f"1-{self.highest}?"
            for _ in range(chosen.randrange(self.max_guesses)):
                guess = chosen.choice([n for n in range(1, self.highest + 1) if n != secret])
                text += f"{guess}{EOS}{'higher' if guess < secret else 'lower'}\n"
            rows.append({"prompt": text, "completion": str(chosen.randint(1, self.highest))})
        return rows

    def build(self, context: BuildContext) -> DataSplits:
        return DataSplits.generated(SFTDataset, self.rows, context, may_repeat=True, max_length=self.max_length)
