"""Data of training sessions: rows of tokens with the targets that follow each, and inputs of a loss per target.

tokens [N]        x0 x1 x2        what the model reads
target_tokens     y0 y1 y2        y_i is predicted after x_0 ... x_i; any tokens, [N] or K each, [N K]
other inputs      w0 w1 w2        [N], for cross_entropy [N K] where the targets are
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.service.losses import Loss

TARGETS = "target_tokens"
MAX_ENTRIES = 2**27  # of padded rows
CANDIDATES = "ref_candidates"  # the field of a batch [B T K] with further tokens whose log-probs are computed


@dataclass(frozen=True)
class Datum:
    """A row of training data.

    Attributes:
        tokens: ids, at least one.
        inputs: `target_tokens`, and what the loss needs, by name: lists, arrays or tensors.
    """

    tokens: Sequence[int]
    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class LossRows:
    """Data as a batch of the training engine.

    Attributes:
        batch: each row a prompt of one token and N responses, which are the targets.
        inputs: of the loss, [B T], or [B T K] for K targets a token; zeros where a row is shorter.
        lengths: N of each row.
        num_targets: K; None for one target a token.
    """

    batch: DataProto
    inputs: dict[str, Tensor]
    lengths: list[int]
    num_targets: int | None


def loss_rows(data: Sequence[Datum], loss: Loss, vocabulary: int, longest: int | None) -> LossRows:
    """Check data and pad them to a batch.

    Args:
        vocabulary: number of token ids of the model.
        longest: tokens that the model can read; None if that is not known.
    Raises:
        ConfigError: names the datum and what is wrong with it.
    """
    if not data:
        raise ConfigError("data is empty: give at least one datum.")
    rows = [_checked(datum, f"data[{index}]", loss, vocabulary, longest) for index, datum in enumerate(data)]
    widths = {row[TARGETS].shape[1] if row[TARGETS].dim() > 1 else None for _, row in rows}
    if len(widths) > 1:
        raise ConfigError(f"data has target_tokens with {widths} targets a token: expected one number for all.")
    (num_targets,) = widths
    lengths = [len(tokens) for tokens, _ in rows]
    entries = len(rows) * max(lengths) * (num_targets or 1)
    if entries > MAX_ENTRIES:
        raise ConfigError(f"data have {entries} entries when padded: at most {MAX_ENTRIES} are computed at once.")
    width, shape = max(lengths), [] if num_targets is None else [num_targets]
    input_ids = torch.zeros(len(rows), width + 1, dtype=torch.int64)
    padded = {name: x.new_zeros(len(rows), width, *shape) for name, x in rows[0][1].items()}
    for index, (tokens, inputs) in enumerate(rows):
        input_ids[index, : len(tokens)] = tokens
        for name, x in inputs.items():
            padded[name][index, : len(x)] = x
    attention = torch.arange(width + 1) <= torch.tensor(lengths)[:, None]
    targets = padded.pop(TARGETS)
    fields = {
        "input_ids": input_ids,
        "attention_mask": attention.long(),
        "position_ids": (attention.long().cumsum(dim=1) - 1).clamp_min(0),
        "responses": targets if num_targets is None else targets[:, :, 0].contiguous(),
        "response_mask": attention[:, 1:].contiguous(),
        **({} if num_targets is None else {CANDIDATES: targets}),
    }
    return LossRows(DataProto.from_dict(fields), padded, lengths, num_targets)


def _checked(
    datum: Datum, name: str, loss: Loss, vocabulary: int, longest: int | None
) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = checked_tokens(datum.tokens, f"{name}.model_input", vocabulary, longest)
    optional = loss.optional or {}
    needed = (TARGETS, *loss.inputs)
    if missing := [key for key in needed if key not in datum.inputs]:
        raise ConfigError(f"{name}.loss_fn_inputs has no {missing[0]}: the loss needs {', '.join(needed)}.")
    if unknown := [key for key in datum.inputs if key not in (*needed, *optional)]:
        known = ", ".join((*needed, *optional))
        raise ConfigError(f"{name}.loss_fn_inputs.{unknown[0]} is not an input of the loss, which takes {known}.")
    inputs = {key: _tensor(value, f"{name}.loss_fn_inputs.{key}") for key, value in datum.inputs.items()}
    targets = inputs[TARGETS]
    if targets.is_floating_point() or bool(((targets < 0) | (targets >= vocabulary)).any()):
        raise ConfigError(
            f"{name}.loss_fn_inputs.{TARGETS} has ids that are no tokens: expected 0 to {vocabulary - 1}."
        )
    inputs[TARGETS] = targets.to(torch.int64)
    inputs |= {key: torch.full(targets.shape, value) for key, value in optional.items() if key not in inputs}
    if targets.dim() not in (1, 2 if not loss.inputs else 1) or 0 in targets.shape:
        kinds = "[N]" if loss.inputs else "[N] or [N K]"
        raise ConfigError(f"{name}.loss_fn_inputs.{TARGETS} has shape {[*targets.shape]}: expected {kinds}.")
    for key, x in inputs.items():
        if x.shape != targets.shape or len(x) != len(tokens):
            raise ConfigError(
                f"{name}.loss_fn_inputs.{key} has shape {[*x.shape]}: expected an entry for each of "
                f"{len(tokens)} tokens of the model input, as {TARGETS} with shape {[*targets.shape]}."
            )
        if key != TARGETS:
            inputs[key] = x if x.is_floating_point() else x.to(torch.float32)
            if not bool(torch.isfinite(inputs[key]).all()):
                raise ConfigError(f"{name}.loss_fn_inputs.{key} has numbers that are not finite.")
    return tokens, inputs


def checked_tokens(tokens: Sequence[int], name: str, vocabulary: int, longest: int | None) -> Tensor:
    """Token ids as a tensor [N].

    Raises:
        ConfigError: there are none, too many, or ids outside of the vocabulary.
    """
    try:
        ids = torch.tensor([*tokens], dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} is no list of token ids ({error}).") from error
    if not len(ids) or ids.dim() != 1:
        raise ConfigError(f"{name} has no tokens: give at least one.")
    if longest is not None and len(ids) > longest:
        raise ConfigError(f"{name} has {len(ids)} tokens: the model reads at most {longest}.")
    if bool(((ids < 0) | (ids >= vocabulary)).any()):
        raise ConfigError(f"{name} has ids that are no tokens: expected 0 to {vocabulary - 1}.")
    return ids


def _tensor(value: Any, name: str) -> Tensor:
    try:
        return value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} is no tensor of numbers ({error}).") from error


def finite(value: Any, name: str, low: float = 0.0, high: float = math.inf) -> float:
    """A number within bounds.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < high or math.isinf(value):
        raise ConfigError(f"{name} is {value!r}: expected a number of at least {low:g}, below {high:g}.")
    return float(value)
