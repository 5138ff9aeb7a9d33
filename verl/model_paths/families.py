"""Execution paths of a model, and those tested for the families of causal language models in transformers.

`families.json` holds the results; `scripts/try_model_families.py` writes it. A record applies to a model if its class
is an unchanged one of transformers and its configuration has the properties recorded for the family.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Scoring = Literal["packed", "padded", "right_padded", "equal_lengths"]
PLAINER: tuple[Scoring, ...] = ("packed", "padded", "right_padded", "equal_lengths")  # from fastest to plainest
CacheKind = Literal["in_place", "own", "none"]


@dataclass(frozen=True, kw_only=True)
class ModelPaths:
    """Execution paths of a model whose results equal a plain forward pass of each row alone.

    Attributes:
        scoring: how rows are combined: `packed`, on one line without padding; `padded`, a batch with padding on both
            sides; `right_padded`, padding only on the right, where causal models cannot see it; `equal_lengths`, rows
            of equal length, without padding.
        shares_prompts: a packed line may have a prompt once for all its responses.
        cache: cache for decoding: `in_place`, keys and values of all tokens; `own`, the model's; `none`, each token
            is computed from the whole row.
        pads_prompts: prompts of several lengths may be decoded together.
        repeats_rows: a prompt may be read once and its cache repeated for each of its samples.
        drops_rows: rows that have ended may leave the batch.
        shares_prefix: attention may read the keys and values of a prompt once for all its samples.
        trains: training mode gives the same results; otherwise (some models choose experts at random or need further
            inputs) it is trained in evaluation mode, without gradient checkpointing.
        own_attention: uses the attention of `verl.model_paths.packed_attention`.
        reasons: why faster paths are not used, one sentence each.
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
        """A copy for eager attention, which supports neither packed rows nor shared prefixes."""
        return replace(self.limited_to("padded"), shares_prompts=False, shares_prefix=False, own_attention=False)

    @property
    def is_fast(self) -> bool:
        """Whether no major optimisation is missing; sharing of prompts does not count."""
        return self.scoring != "equal_lengths" and self.cache != "none" and self.pads_prompts


PLAIN = ModelPaths()
UNTRIED = ModelPaths(scoring="padded", cache="own")  # for an unknown family; its first batch is compared
TABLE = Path(__file__).with_name("families.json")
NOT_A_POLICY = "each token sees those that come after it, so it cannot be a policy. Give a causal language model."
COMMON_LAYER_TYPES = {"full_attention", "sliding_attention"}
STATIC_ROPE = {"default", "linear", "llama3", "proportional", "yarn"}  # the same frequencies in rows of any length
LENGTH_OF_ROPE = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}


@dataclass(frozen=True)
class FamilyRecord:
    """Result of trying one configuration of a family.

    Attributes:
        paths: name of the execution paths in the table; empty for a model that is refused or that transformers cannot
            build.
        refusal: why no execution path can train it; None if one can.
        fault: why transformers cannot build it from a configuration alone; None if it can.
        when: values of the configuration that the record is limited to; a list stands for the set of its items.
        layer_types: its layer types other than full and sliding attention.
        longest: entry of the configuration that limits the length of rows; beyond it, tokens depend on later ones or
            have no position.
        needs_eager: `sdpa` leaves out a part of its attention.
        trains: training mode gives the same results.
        stages: it may be split into pipeline stages.
        nondeterministic: its operations without a deterministic form on a GPU; None if unknown.
    """

    paths: str = ""
    refusal: str | None = None
    fault: str | None = None
    when: Mapping[str, Any] = field(default_factory=dict)
    layer_types: tuple[str, ...] = ()
    longest: str | None = None
    needs_eager: bool = False
    trains: bool = True
    stages: bool = False
    nondeterministic: tuple[str, ...] | None = ()

    def holds_for(self, config: Any) -> bool:
        """Whether a configuration has the tested properties."""
        return all(_items(_entry(config, name)) == _items(value) for name, value in self.when.items())


@dataclass(frozen=True)
class FamilyTable:
    """The table of all families.

    Attributes:
        versions: of torch and transformers when the table was made.
        paths: execution paths by name, with `sdpa` attention.
        families: records by `model_type`.
    """

    versions: Mapping[str, str]
    paths: Mapping[str, ModelPaths]
    families: Mapping[str, tuple[FamilyRecord, ...]]


@functools.lru_cache
def family_table() -> FamilyTable:
    """The table in `families.json`."""
    table = json.loads(TABLE.read_text("utf-8"))
    return FamilyTable(
        table["versions"],
        {name: ModelPaths(**paths) for name, paths in table["paths"].items()},
        {family: tuple(_record(entry) for entry in entries) for family, entries in table["families"].items()},
    )


def _record(entry: dict[str, Any]) -> FamilyRecord:
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in entry.items()}
    return FamilyRecord(**values)


def record_for(config: Any, kind: type) -> FamilyRecord | str:
    """The record for models of a class with a transformers configuration, or why there is none."""
    if not kind.__module__.startswith("transformers.models."):
        return f"{kind.__qualname__} is no class of transformers"
    if _entry(config, "is_causal") is False or _entry(config, "use_bidirectional_attention") in (True, "all"):
        return FamilyRecord(refusal=NOT_A_POLICY)
    records = family_table().families.get(config.model_type, ())
    record = next((record for record in records if record.holds_for(config)), None)
    if record is None or record.fault is not None:
        return f"the family {config.model_type} was not tried" + " with this configuration" * bool(records)
    layer_types = set(_entry(config, "layer_types") or ()) - COMMON_LAYER_TYPES - set(record.layer_types)
    if layer_types:
        return f"the family {config.model_type} was not tried with layers of the kind {', '.join(sorted(layer_types))}"
    if rope := rope_types(config) - STATIC_ROPE - LENGTH_OF_ROPE.keys():
        return f"the family {config.model_type} was not tried with rotary positions of the kind {min(rope)}"
    return record


def row_limit(config: Any, record: FamilyRecord | None) -> tuple[str, int] | None:
    """The configuration entry, and its value, beyond which a token's results depend on the length of its row; None if
    there is no such limit."""
    names = [LENGTH_OF_ROPE[kind] for kind in sorted(rope_types(config) & LENGTH_OF_ROPE.keys())]
    names += [record.longest] if record is not None and record.longest is not None else []
    values = [(name, _limit(config, name)) for name in names]
    return min(((name, value) for name, value in values if value), key=lambda limit: limit[1], default=None)


def rope_types(config: Any) -> set[str]:
    """Kinds of rotary position embeddings in a configuration."""
    rope = _entry(config, "rope_parameters") or {}
    return {str(part["rope_type"]) for part in (rope, *rope.values()) if isinstance(part, dict) and "rope_type" in part}


@dataclass(frozen=True)
class FamilySummary:
    """A record of the table as text.

    Attributes:
        family: `model_type`.
        name: family, with the properties to which the record is limited.
        status: `fast`, `plain`, `refused` or `not built`, with the longest rows.
        scoring: batching of rows in scoring.
        decoding: path of decoding.
        note: why it is refused or not built, and other limits.
    """

    family: str
    name: str
    status: str
    scoring: str = ""
    decoding: str = ""
    note: str = ""


def summaries() -> list[FamilySummary]:
    """All records of the table, by family."""
    return [_summary(family, record) for family, records in family_table().families.items() for record in records]


def _summary(family: str, record: FamilyRecord) -> FamilySummary:
    when = ", ".join(f"{key} {' '.join(map(str, _items(value)))}" for key, value in record.when.items())
    name = f"{family} ({when})" if when else family
    if record.refusal is not None or record.fault is not None:
        status = "not built" if record.refusal is None else "refused"
        return FamilySummary(family, name, status, note=record.refusal or f"transformers: {record.fault}")
    paths = family_table().paths[record.paths]
    status = ("fast" if paths.is_fast else "plain") + f" up to {record.longest}" * (record.longest is not None)
    notes = ["attention=eager only"] * record.needs_eager + ["trained in evaluation mode"] * (not record.trains)
    notes += [f"{name} has no deterministic form on a GPU" for name in record.nondeterministic or ()]
    scoring, _, decoding = record.paths.partition("; ")
    return FamilySummary(family, name, status, scoring, decoding, ", ".join(notes))


def _entry(config: Any, name: str) -> Any:
    """An entry of a configuration, else of its text model's configuration."""
    value = getattr(config, name, None)
    return getattr(config.get_text_config(), name, None) if value is None else value


def _limit(config: Any, name: str) -> int | None:
    rope = _entry(config, "rope_parameters") or {}
    value = _entry(config, name) or rope.get(name)
    return int(value) if value else None


def _items(value: Any) -> set[Any]:
    return set(value) if isinstance(value, tuple | list) else {value}
