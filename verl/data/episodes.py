"""`data=episodes`: one prompt for every episode, for environments that say the rest themselves when they are reset."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from verl.component import BuildContext, component
from verl.data.base import DataSplits, PromptSource
from verl.data.rlhf_dataset import RLHFDataset


@component
class EpisodePrompts(PromptSource):
    """Rows of one prompt, each with a number of its own in the column `index`, which tells episodes apart.

    Args:
        prompt: a text; as it stands, unless a system prompt makes it a chat.
        system_prompt: opens a chat whose user says `prompt`; None leaves the text as it is.
        train_size: episodes of an epoch.
        held_out: episodes of an evaluation, numbered after those.
        max_prompt_length: tokens.
    """

    prompt: str = "Play. "
    system_prompt: str | None = None
    train_size: PositiveInt = 1024
    held_out: NonNegativeInt = 32
    max_prompt_length: PositiveInt = 512

    def columns(self) -> dict[str, frozenset[str]]:
        return {"data": frozenset({"index"})}

    def build(self, context: BuildContext) -> DataSplits:
        config = {"max_prompt_length": self.max_prompt_length, "system_prompt": self.system_prompt}

        def made(first: int, size: int) -> RLHFDataset:
            rows = [{"prompt": self.prompt, "index": first + i} for i in range(size)]
            return RLHFDataset.from_rows(rows, tokenizer=context.tokenizer, config=config)

        evaluation = made(self.train_size, self.held_out) if self.held_out else None
        return DataSplits(train=made(0, self.train_size), eval=evaluation)
