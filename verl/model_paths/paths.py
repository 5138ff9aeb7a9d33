"""The ways of running a model, and which of them were shown to be right for one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Scoring = Literal["packed", "padded", "right_padded", "equal_lengths"]
PLAINER: tuple[Scoring, ...] = ("packed", "padded", "right_padded", "equal_lengths")  # each than those before it
CacheKind = Literal["in_place", "own", "none"]


@dataclass(frozen=True, kw_only=True)
class ModelPaths:
    """Execution paths of a model whose results equal a plain forward pass of each row alone.

    Attributes:
        scoring: rows with other rows: `packed`, on one line without padding; `padded`, as a batch with padding on both
            sides; `right_padded`, with padding on the right alone, which no causal model can see; `equal_lengths`, only
            rows of one length together, without padding.
        shares_prompts: a prompt may stand once on a packed line for all its responses.
        cache: while decoding: `in_place`, ours, with room for new tokens; `own`, the one that the model makes; `none`,
            every token is computed from the whole row.
        pads_prompts: prompts of several lengths may be decoded together.
        repeats_rows: a prompt may be read once and its cache repeated for each of its samples.
        drops_rows: rows that have ended may leave the batch.
        shares_prefix: attention may read the keys and values of a prompt once for all its samples.
        trains: it computes the same in training mode, where some models draw experts at random or want further inputs;
            where not, it is trained in evaluation mode, without gradient checkpointing.
        own_attention: attention is taken from `verl.model_paths.packed_attention`.
        reasons: why a way is not used, one sentence each.
    """

    scoring: Scoring = "equal_lengths"
    shares_prompts: bool = False
    cache: CacheKind = "none"
    pads_prompts: bool = False
    repeats_rows: bool = False
    drops_rows: bool = False
    shares_prefix: bool = False
    trains: bool = True
    own_attention: bool = False
    reasons: tuple[str, ...] = ()

    def limited_to(self, scoring: Scoring) -> ModelPaths:
        """A copy with rows scored by this path, unless the current one is simpler."""
        if PLAINER.index(scoring) <= PLAINER.index(self.scoring):
            return self
        return replace(self, scoring=scoring)

    def by_eager(self) -> ModelPaths:
        """A copy for eager attention, which packed rows and shared prefixes have no form for."""
        return replace(self.limited_to("padded"), shares_prompts=False, shares_prefix=False, own_attention=False)

    @property
    def is_fast(self) -> bool:
        """Nothing that costs much is left out; sharing is a matter of taste of the model."""
        return self.scoring != "equal_lengths" and self.cache != "none" and self.pads_prompts


PLAIN = ModelPaths()
UNTRIED = ModelPaths(scoring="padded", cache="own")  # of a model of an unknown family; its first batch is compared
FAST = ModelPaths(
    scoring="packed",
    shares_prompts=True,
    cache="in_place",
    pads_prompts=True,
    repeats_rows=True,
    drops_rows=True,
    shares_prefix=True,
    own_attention=True,
)
