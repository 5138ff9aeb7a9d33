"""Whether two models read the same token ids the same way."""

from __future__ import annotations

from typing import Any

from verl.models.source import ModelSource

PROBE = "The quick brown fox: 37+58=95, naive cafe?\n\tx"


def reads_alike(one: Any, other: Any) -> bool:
    """Whether two tokenizers give every text the same ids, as far as their vocabulary and a probe tell."""
    return one.get_vocab() == other.get_vocab() and one(PROBE).input_ids == other(PROBE).input_ids


def tokenizer_fault(name: str, source: ModelSource, tokenizer: Any) -> str | None:
    """What is wrong if a model that is given the actor's token ids was made for others; None if nothing is.

    Args:
        name: config path of the model, for the message.
        source: the model.
        tokenizer: the actor's.
    """
    other = source.load_tokenizer()
    if reads_alike(other, tokenizer):
        return None
    return (
        f"{name} has another tokenizer than actor.model ({len(other)} and {len(tokenizer)} tokens): it is given the "
        "actor's token ids and would read another text. Choose a model of the actor's family."
    )
