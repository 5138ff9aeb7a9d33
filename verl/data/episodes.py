"""`data=episodes`: prompts for environments that provide the rest of the task when they are reset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from verl.component import BuildContext, component
from verl.data.base import DataSplits, PromptSource
from verl.data.rlhf_dataset import RLHFDataset
from verl.errors import ConfigError


@component
class EpisodePrompts(PromptSource):
    """Rows with a prompt, and an episode number in the column `index`.

    Args:
        prompt: text of every prompt. None for the first messages of each task of the environment, as a chat if there is
            a chat template, else as lines of text.
        system_prompt: makes each prompt a chat with this system message and `prompt` as user message; None for none.
        chat_template, chat_template_kwargs: see `RowOptions`.
        train_size: episodes of an epoch; at most the number of tasks of the environment less `held_out`.
        held_out: episodes of an evaluation, numbered after those of training.
        max_prompt_length: the most tokens of a prompt.
    """

    prompt: str | None = "Play. "
    system_prompt: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    train_size: PositiveInt = 1024
    held_out: NonNegativeInt = 32
    max_prompt_length: PositiveInt = 512

    def columns(self) -> dict[str, frozenset[str]]:
        return {"data": frozenset({"index"})}

    def build(self, context: BuildContext) -> DataSplits:
        config = {
            "max_prompt_length": self.max_prompt_length,
            "system_prompt": self.system_prompt,
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        prompts = self._prompts(context)
        size = len(prompts) - self.held_out

        def made(begin: int, end: int) -> RLHFDataset:
            rows = [{"prompt": prompts[i], "index": i} for i in range(begin, end)]
            return RLHFDataset.from_rows(rows, tokenizer=context.tokenizer, config=config, tools=context.tools)

        evaluation = made(size, len(prompts)) if self.held_out else None
        return DataSplits(train=made(0, size), eval=evaluation)

    def _prompts(self, context: BuildContext) -> Sequence[Any]:
        count = self.train_size + self.held_out
        if self.prompt is not None:
            return [self.prompt] * count
        rows = () if context.prompts is None else context.prompts(count)
        if not rows:
            raise ConfigError("prompt is null, and the environment has no prompts of its own. Set data.prompt.")
        if len(rows) <= self.held_out:
            raise ConfigError(
                f"held_out is {self.held_out}, and the environment has only {len(rows)} tasks: none is left to train "
                "on."
            )
        is_chat = self.chat_template is not None or getattr(context.tokenizer, "chat_template", None) is not None
        return rows if is_chat else [lines_of(messages) for messages in rows]


def lines_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as lines of text, for models without a chat template."""
    return "".join(f"{message['content']}\n" for message in messages)
