"""The table of batch fields: name, dims, dtype, unit, meaning, producer and padding.

Dims: B responses, P prompt length, T response length, S = P + T, N rows of an episode, L layers with experts, K experts
per token. `[b, t]` always belongs to response token t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from verl.errors import DataProtoValidationError
from verl.protocol.provenance import Source, contract_error
from verl.protocol.ragged import Ragged

DIMS = {
    "B": "responses",
    "P": "prompt length",
    "T": "response length",
    "S": "P + T, prompt and response",
    "N": "rows of an episode",
    "L": "layers with experts",
    "K": "experts of a token",
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "int64": (torch.int64,),
    "int16": (torch.int16,),
    "bool": (torch.bool,),
    "float": _FLOATS,
}

# of the tensors of a batch: torch has all operations for them, and so has safetensors
_ANY = frozenset((*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))

# dim -> (size, the field that bound it)
Bound = dict[str, tuple[int, str]]


@dataclass(frozen=True)
class Field:
    """The contract of one field.

    Args:
        name: its key in a batch.
        dims: letters of `DIMS`, the first of them B.
        dtype: `int64`, `int16`, `bool`, or `float` for any floating dtype.
        unit: such as `nats`; empty for none.
        meaning: one phrase for the glossary.
        producer: what makes it, for the glossary.
        pad: padding when batches of different lengths are joined: a number, or `pad_token` for
            `meta_info["pad_token_id"]` (0 if missing).
    Raises:
        DataProtoValidationError: unknown dims or dtype.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str
    unit: str = ""
    meaning: str = ""
    producer: str = ""
    pad: float | bool | str = 0

    def __post_init__(self):
        dims = tuple(self.dims)
        if dims[:1] != ("B",) or not set(dims) <= set(DIMS) or len(set(dims)) < len(dims):
            others = ", ".join(name for name in DIMS if name != "B")
            raise DataProtoValidationError(
                f"dims of `{self.name}` are {dims}: expected B first, then different ones of {others}.", self.name
            )
        if self.dtype not in DTYPES:
            raise DataProtoValidationError(
                f"dtype of `{self.name}` is {self.dtype!r}: expected one of {', '.join(DTYPES)}.", self.name
            )
        if isinstance(self.pad, str) and self.pad != "pad_token":
            raise DataProtoValidationError(
                f"pad of `{self.name}` is {self.pad!r}: expected a number or `pad_token`.", self.name
            )
        object.__setattr__(self, "dims", dims)

    @property
    def shape(self) -> str:
        """The dims as text: `[B T]`."""
        return f"[{' '.join(self.dims)}]"


TABLE: dict[str, Field] = {}
FIELDS: Mapping[str, Field] = MappingProxyType(TABLE)


def register(field: Field) -> Field:
    """Register a user-defined field, so that it is checked and re-padded like those of verl.

    Raises:
        DataProtoValidationError: the name is registered with another contract.
    """
    if (known := TABLE.setdefault(field.name, field)) != field:
        raise DataProtoValidationError(
            f"`{field.name}` is registered already, as {known.shape} {known.dtype}: choose another name.", field.name
        )
    return field


def check_tensor(name: str, tensor: Any, bound: Bound, sources: Mapping[str, Source]) -> None:
    """Check type, dtype kind and dims of one field, and bind the dims seen for the first time into `bound`.

    An unregistered field needs B as its first dim and is free otherwise.

    Raises:
        DataProtoValidationError: naming the field, what was expected and found, and who made it.
    """
    _check_name(name, sources)
    field = TABLE.get(name)
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        hint = " (a column that is not a tensor belongs in non_tensors)" if kind in ("ndarray", "list") else ""
        raise contract_error(name, "a torch.Tensor", f"{kind}{hint}", sources.get(name))
    if tensor.layout != torch.strided or tensor.is_nested or tensor.dtype not in _ANY:
        kind = "a nested tensor" if tensor.is_nested else f"{_dtype(tensor)}, {tensor.layout}"
        expected = f"a dense tensor of {', '.join(sorted(str(x).removeprefix('torch.') for x in _ANY))}"
        raise contract_error(name, expected, kind, sources.get(name))
    shape = tensor.shape
    if field is None:
        if not shape:
            raise contract_error(name, "a tensor whose first dim is B", "a tensor without dims", sources.get(name))
        dims: tuple[str, ...] = ("B",)
    else:
        dims = field.dims
        if len(shape) != len(dims):
            raise contract_error(name, f"shape {_expected(dims, bound)}", f"shape {list(shape)}", sources.get(name))
        if tensor.dtype not in DTYPES[field.dtype]:
            raise contract_error(name, f"dtype {field.dtype}", f"dtype {_dtype(tensor)}", sources.get(name))
    for letter, size in zip(dims, shape):
        if (holder := bound.get(letter)) is None:
            bound[letter] = (size, name)
            if letter != "B":
                _check_sum(name, bound, sources)
        elif holder[0] != size:
            raise _size_error(name, dims, letter, list(shape), bound, sources)


def check_rows(name: str, rows: int, bound: Bound, sources: Mapping[str, Source]) -> None:
    """Check and bind B for a column of JSON values, which may not take the name of a registered field."""
    _check_name(name, sources)
    if name in TABLE:
        raise contract_error(name, f"a tensor {TABLE[name].shape}", "a column that is not a tensor", sources.get(name))
    if bound.setdefault("B", (rows, name))[0] != rows:
        raise _size_error(name, ("B",), "B", [rows], bound, sources)


def check_ragged(name: str, field: Any, bound: Bound, sources: Mapping[str, Source]) -> None:
    """Check a ragged field, and bind B by its rows.

    Raises:
        DataProtoValidationError: another type or dtype, or offsets or an index that break the rules of `Ragged`.
    """
    if not isinstance(field, Ragged):
        raise contract_error(name, "a Ragged", type(field).__name__, sources.get(name))
    check_rows(name, len(field.index), bound, sources)
    values: Bound = {}
    check_tensor(f"{name}.values", field.values, values, sources)
    if (fault := field.fault()) is not None:
        raise contract_error(name, "offsets and an index of Ragged", fault, sources.get(name))


def bound_dims(
    tensors: Mapping[str, Any],
    columns: Mapping[str, Any],
    sources: Mapping[str, Source],
    ragged: Mapping[str, Any] = {},
) -> Bound:
    """Check all fields of a batch, and return the dims that they bind."""
    bound: Bound = {}
    for name, tensor in tensors.items():
        check_tensor(name, tensor, bound, sources)
    for name, column in columns.items():
        check_rows(name, len(column), bound, sources)
    for name, field in ragged.items():
        check_ragged(name, field, bound, sources)
    return bound


def _check_name(name: Any, sources: Mapping[str, Source]) -> None:
    if not isinstance(name, str):
        raise contract_error(name, "a text as the name of a field", type(name).__name__, sources.get(name))
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise contract_error(name, "a name in Unicode", f"{name!r}, half a character", sources.get(name)) from None


def _size_error(
    name: str, dims: tuple[str, ...], letter: str, shape: list[int], bound: Bound, sources: Mapping[str, Source]
):
    size, holder = bound[letter]
    origin = f" by {sources[holder]}" if holder in sources else ""
    expected = f"shape {_expected(dims, bound)}; {letter} = {size} was bound by `{holder}`, made{origin}"
    return contract_error(name, expected, f"shape {shape}", sources.get(name))


def _check_sum(name: str, bound: Bound, sources: Mapping[str, Source]) -> None:
    if not ("P" in bound and "T" in bound and "S" in bound):
        return
    (p, of_p), (t, of_t), (s, of_s) = bound["P"], bound["T"], bound["S"]
    if s != p + t:
        makers = ", ".join(
            f"`{holder}` by {sources[holder]}" for holder in dict.fromkeys((of_p, of_t, of_s)) if holder in sources
        )
        sizes = f"P = {p} of `{of_p}`, T = {t} of `{of_t}`, S = {s} of `{of_s}`" + (f" ({makers})" if makers else "")
        raise contract_error(name, f"S = P + T, {s} = {p} + {t}", sizes, sources.get(name))


def _expected(dims: tuple[str, ...], bound: Bound) -> str:
    sizes = " ".join(str(bound[letter][0]) if letter in bound else letter for letter in dims)
    letters = " ".join(dims)
    return f"[{letters}]" if sizes == letters else f"[{letters}] = [{sizes}]"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _add(
    names: str, dims: str, dtype: str, unit: str, meaning: str, producer: str, pad: float | bool | str = 0
) -> None:
    register(Field(names, tuple(dims), dtype, unit, meaning, producer, pad))


_add("prompts", "BP", "int64", "token id", "prompt tokens, left-padded", "data", "pad_token")
_add("prompt_mask", "BP", "bool", "", "True on prompt tokens, False on their padding", "data", False)
_add("prompt_ids", "B", "int64", "", "stable identity of the data row; keys the sampling noise", "data")
_add(
    "input_ids",
    "BS",
    "int64",
    "token id",
    "left-padded prompt, then right-padded response",
    "rollout, SFT data",
    "pad_token",
)
_add("attention_mask", "BS", "int64", "", "1 on prompt and response tokens, 0 on padding", "rollout, SFT data")
_add("position_ids", "BS", "int64", "", "place of a token in its row, counted without padding", "rollout, SFT data")
_add("responses", "BT", "int64", "token id", "the response part of input_ids", "rollout", "pad_token")
_add(
    "response_mask",
    "BT",
    "bool",
    "",
    "tokens the policy chose, end token included; the only loss mask of PPO",
    "rollout",
    False,
)
_add("sample_ids", "B", "int64", "", "index of the response within its group", "rollout")
_add("group_ids", "B", "int64", "", "which responses share a prompt", "rollout")
_add("policy_version", "B", "int64", "optimizer step", "the step whose weights sampled the row", "rollout")
_add("token_versions", "BT", "int64", "optimizer step", "the step whose weights sampled the token", "rollout", -1)
_add("is_replayed", "B", "bool", "", "the row was drawn in an earlier step", "replay buffer", False)
_add("is_on_policy", "B", "bool", "", "the weights that gave old_log_probs drew the row", "actor", False)
_add("rollout_log_probs", "BT", "float", "nats", "log-probability by the engine that sampled", "rollout")
_add(
    "routed_experts",
    "BTLK",
    "int16",
    "",
    "experts that each router chose in the forward pass that token t was sampled from; -1 where that is not known",
    "rollout",
    -1,
)
_add("old_log_probs", "BT", "float", "nats", "log-probability by the trainer's weights before the update", "actor")
_add("ref_log_probs", "BT", "float", "nats", "log-probability by the frozen reference", "reference")
_add("ref_candidates", "BTK", "int64", "token id", "likeliest tokens of the teacher", "reference")
_add("ref_candidate_log_probs", "BTK", "float", "nats", "their log-probabilities by the teacher", "reference")
_add("log_probs", "BT", "float", "nats", "log-probability by the weights being updated; carries gradient", "actor")
_add("entropies", "BT", "float", "nats", "entropy of the distribution that each token was drawn from", "actor")
_add("values", "BT", "float", "reward", "the critic's estimate before token t is chosen", "critic")
_add("token_level_scores", "BT", "float", "reward", "raw score, placed on the token that earned it", "reward")
_add("token_level_rewards", "BT", "float", "reward", "score less the KL penalty", "KL control")
_add("returns", "BT", "float", "reward", "what the value of token t should have been", "advantage estimator")
_add("advantages", "BT", "float", "reward", "how much better token t was than expected", "advantage estimator")
_add("turn_ids", "BT", "int64", "", "turn of an episode that a token belongs to; -1 on padding", "environment", -1)
_add("episode_ids", "B", "int64", "", "prompt and sample as one number", "environment")
_add("row_ids", "BT", "int64", "", "row of its episode that a token belongs to; -1 on padding", "environment", -1)
_add("contexts", "BNP", "int64", "token id", "tokens before each row of an episode; -1 on padding", "environment", -1)
_add("episode_tokens", "B", "int64", "tokens", "on the masks of all rows of the episode that a row is of", "trainer")
_add("turn_rewards", "BT", "float", "reward", "of the environment, on the last token of each turn", "environment")
_add("is_chosen", "B", "bool", "", "the response is the better one of its pair, or a desirable one", "preference data")
_add("row_margins", "B", "float", "reward", "by how much the chosen response is better", "preference data")
_add("row_scores", "B", "float", "", "log-probability of the response in nats, or score of a reward model", "learner")
_add("ref_scores", "B", "float", "nats", "log-probability of the response by the frozen reference", "reference")
_add("row_coefs", "B", "float", "", "gradient of the loss with respect to `row_scores`", "trainer")
_add("labels", "BS", "int64", "token id", "the token to learn at each place; -100 is ignored", "SFT data", -100)
_add("loss_mask", "BS", "bool", "", "places that count in the SFT loss", "SFT data", False)
_add("media_keys", "B", "int64", "", "digest of the images of a prompt; 0 without images", "data")
