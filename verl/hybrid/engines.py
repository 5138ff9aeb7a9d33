"""The rollout engine of a HybridActor: found by name, and told how a call wants responses to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.compose.nearest import hint, nearest
from verl.compose.paths import conf_dir, group_options
from verl.errors import ConfigError
from verl.hybrid.call import Call
from verl.rollout.base import Rollout
from verl.rollout.hf import HFRollout


def named_rollout(rollout: str | Rollout) -> Rollout:
    """The engine that a name means: an option of the group `rollout`, with its defaults.

    Raises:
        ConfigError: there is no such option, or it needs more than its name.
    """
    if isinstance(rollout, Rollout):
        return rollout
    if rollout == "hf":
        return HFRollout()
    known = group_options(conf_dir())["rollout"]
    if rollout not in known:
        raise ConfigError(
            f"rollout is {rollout!r}: this version has {', '.join(known)}.{hint(nearest(str(rollout), known))} "
            "rollout='hf' generates with the training weights."
        )
    from verl.compose.option import option

    return option("ppo", "rollout", rollout)


@contextmanager
def naming_ends(model: Any, tokenizer: Any, call: Call) -> Iterator[Any]:
    """Within, the model and the tokenizer that is given name the stop and pad tokens of a call, and no others."""
    config = model.generation_config
    before = config.eos_token_id
    config.eos_token_id = list(call.stops)
    try:
        yield EndsOfCall(tokenizer, call.pad)
    finally:
        config.eos_token_id = before


class EndsOfCall:
    """A tokenizer, or none, with the pad token of a call and no end of text of its own: the call names those."""

    eos_token_id = None

    def __init__(self, tokenizer: Any, pad: int):
        self.tokenizer, self.pad_token_id = tokenizer, pad

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.tokenizer is None:
            raise ConfigError("tokenizer is missing: this rollout engine needs one. Give HybridActor(tokenizer=).")
        return self.tokenizer(*args, **kwargs)
