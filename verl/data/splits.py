"""What a data description builds: the rows to train on and the rows to evaluate on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.component import Description
from verl.data.sampler import Mixture
from verl.protocol import DataProto


class Dataset(Protocol):
    """Rows that were tokenised once and can be joined into a batch in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def collate(self, indices: Sequence[int]) -> DataProto:
        """The rows at `indices`, padded to the longest of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class PromptSource(Description):
    """Base of what `data` may be in reinforcement learning: builds `Splits` of prompts."""


@dataclass(frozen=True, kw_only=True)
class TextSource(Description):
    """Base of what `data` may be in supervised fine-tuning: builds `Splits` of texts to imitate."""


@dataclass(frozen=True)
class Splits:
    """The two parts of the data of a run.

    Attributes:
        train: the rows to learn from.
        eval: rows that are never trained on, or None where there are none.
        mixture: the parts of `train` and their shares of an epoch; None visits every row once.
    """

    train: Dataset
    eval: Dataset | None = None
    mixture: Mixture | None = None
