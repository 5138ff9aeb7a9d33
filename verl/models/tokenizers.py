"""Whether two models read the same token ids the same way."""

from __future__ import annotations

from typing import Any

from verl.models.source import ModelSource

PROBE = "The quick brown fox: 37+58=95, naive cafe?\n\tx"


def tokenizer_fault(name: str, source: ModelSource, tokenizer: Any) -> str | None:
    """What is wrong if a model that is given the actor's token ids was made for others; None if nothing is.

    Args:
        name: config path of the model, for the message.
        source: the model.
        tokenizer: the actor's.
    """
    other = source.load_tokenizer()
    if other.get_vocab() == tokenizer.get_vocab() and other(PROBE).input_ids == tokenizer(PROBE).input_ids:
        return None
    return (
        f"{name} has another tokenizer than actor.model ({len(other)} and {len(tokenizer)} tokens): it is given the "
        "actor's token ids and would read another text. Choose a model of the actor's family."
    )
