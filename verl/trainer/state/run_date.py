"""The day that dated chat templates write into prompts: that on which the run began, after a resume too.

Llama 3's template and others write the day's date (`strftime_now`) into the system message, so that a run that is
resumed on another day would train on other prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl.checkpoint.resolve import ResumePoint
from verl.component import BuildContext
from verl.data import chat_template
from verl.data.chat_template import ChatTemplate, pin_date

_log = logging.getLogger(__name__)
PART = "date"
FILE = "scheduler/state.json"


class RunDate:
    """The part of a checkpoint that holds the day.

    Attributes:
        day: as 2026-11-23.
        is_read: whether the chat template of the run reads it.
    """

    def __init__(self, context: BuildContext):
        self.day, self.is_read = context.day, ChatTemplate(context.tokenizer).is_dated
        if self.is_read:
            _log.info("The chat template writes the current date: %s, for the whole run and its resumes.", self.day)

    @property
    def parts(self) -> dict[str, RunDate]:
        """The part itself, where a checkpoint has to hold it."""
        return {PART: self} if self.is_read else {}

    def state_dict(self) -> Mapping[str, Any]:
        return {"day": self.day}

    def load_state_dict(self, state: Any) -> None:
        """`go_on_from` has taken the day, before prompts were rendered."""

    def go_on_from(self, point: ResumePoint | None, tokenizer: Any) -> bool:
        """Use the day of a checkpoint; returns whether it differs, so that prompts must be rendered again."""
        if point is None or not self.is_read:
            return False
        day = (point.read_json(FILE).get(PART) or {}).get("day")
        if day is None:
            _log.warning(
                "The chat template writes the day's date, and the checkpoint does not hold the day of its run: prompts "
                "now have %s, and may have had another.",
                self.day,
            )
        if day in (None, self.day):
            return False
        _log.info("The chat template writes the day's date: %s, as before this run was interrupted.", day)
        self.day = day
        pin_date(tokenizer, day)
        return True


def with_day(context: BuildContext) -> BuildContext:
    """The context with a day: today, unless it has one."""
    return context if context.day else replace(context, day=chat_template.today())
