"""Data of training sessions: rows of tokens with the targets that follow each, and inputs of a loss per target.

tokens [N]        x0 x1 x2        what the model reads
target_tokens     y0 y1 y2        y_i is predicted after x_0 ... x_i; any tokens, [N] or K each, [N K]
other inputs      w0 w1 w2        [N], for cross_entropy [N K] where the targets are

Rows of a prompt have its tokens as targets without influence on the loss. The model reads such a prompt once for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.engines.chunked_logprobs import token_log_probs
from verl.errors import ConfigError
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import LMHead
from verl.protocol import DataProto
from verl.service.losses import Loss, Settings

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
class LossOutput:
    """Result of a forward pass.

    Attributes:
        loss: sum over all target tokens, in nats for cross_entropy.
        log_probs: for each datum, of its targets [N] or [N K].
        per_token: for each datum, the loss of each token, of the same shape.
    """

    loss: float
    log_probs: list[Tensor]
    per_token: list[Tensor]


@dataclass(frozen=True)
class LossRows:
    """Data as a batch of the training engine, with a loss.

    Attributes:
        batch: each row a prompt of one token and N responses, which are the targets. Those of a shared prompt are on
            the mask of its first row alone.
        loss, settings: the loss.
        inputs: of the loss, [B T], or [B T K] for K targets a token; zeros where a row is shorter.
    """

    batch: DataProto
    loss: Loss
    settings: Settings
    inputs: dict[str, Tensor]

    def scores(
        self, head: LMHead, model: Any, micro: MicroBatch, top_k: int = 0, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """`log_probs` of the targets of a micro-batch, [b t] or [b t K]; with `top_k` those of one target a token, the
        `likeliest` tokens at each place and `of_likeliest`, their log-probs, [b t k]."""
        wanted = CANDIDATES if CANDIDATES in micro.tensors else None
        found: Any = token_log_probs(model, head, micro, temperature, top_k=top_k, candidates=wanted)
        if not top_k:
            return {"log_probs": found.log_probs if wanted is None else found.candidate_log_probs}
        return {"log_probs": found.log_probs, "likeliest": found.candidates, "of_likeliest": found.candidate_log_probs}

    def losses(self, log_probs: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Losses of the targets, 0 off the mask, from log-probs [b t] or [b t K] of some rows."""
        inputs = {name: x[rows, : log_probs.shape[1]].to(log_probs) for name, x in self.inputs.items()}
        mask = self.batch["response_mask"][rows, : log_probs.shape[1]].to(log_probs.device)
        losses = self.loss.per_token(log_probs, inputs, self.settings)
        return torch.where(mask if losses.dim() == 2 else mask[..., None], losses, 0.0)

    def output(self, log_probs: Tensor) -> LossOutput:
        """The result, from log-probs of all rows."""
        x, losses = self.batch.batch, self.losses(log_probs)
        for row, (first, shared) in enumerate(zip(x["prefix_of"].tolist(), x["prefix_tokens"].tolist(), strict=True)):
            log_probs[row, : shared - 1] = log_probs[first, : shared - 1]
        lengths = (x["attention_mask"].sum(dim=1) - 1).tolist()
        of_rows = ([row[:n] for row, n in zip(each, lengths, strict=True)] for each in (log_probs, losses))
        return LossOutput(float(losses.double().sum()), *of_rows)


def loss_rows(data: Sequence[Datum], loss: Loss, settings: Settings, vocabulary: int, longest: int | None) -> LossRows:
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
    shapes = {row[TARGETS].shape[1:] for _, row in rows}
    if len(shapes) > 1:
        raise ConfigError("data have several numbers of target_tokens for a token: expected the same in each datum.")
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    width, shape = int(lengths.max()), [*shapes.pop()]
    if (entries := len(rows) * width * (shape or [1])[0]) > MAX_ENTRIES:
        raise ConfigError(f"data have {entries} entries when padded: at most {MAX_ENTRIES} are computed at once.")
    input_ids = torch.zeros(len(rows), width + 1, dtype=torch.int64)
    padded = {name: x.new_zeros(len(rows), width, *shape) for name, x in rows[0][1].items()}
    for index, (tokens, inputs) in enumerate(rows):
        input_ids[index, : len(tokens)] = tokens
        for name, x in inputs.items():
            padded[name][index, : len(x)] = x
    attention = torch.arange(width + 1) <= lengths[:, None]
    targets, (shared, first) = padded.pop(TARGETS), _shared_prompts(rows, loss)
    is_counted = (torch.arange(width) >= (shared - 1)[:, None]) | (first == torch.arange(len(rows)))[:, None]
    fields = {
        "input_ids": input_ids,
        "attention_mask": attention.long(),
        "position_ids": (attention.long().cumsum(dim=1) - 1).clamp_min(0),
        "responses": targets[..., 0].contiguous() if shape else targets,
        "response_mask": attention[:, 1:] & is_counted,
        "prefix_tokens": shared,
        "prefix_of": first,
        **({CANDIDATES: targets} if shape else {}),
    }
    return LossRows(DataProto.from_dict(fields), loss, settings, padded)


def _shared_prompts(rows: Sequence[tuple[Tensor, Mapping[str, Tensor]]], loss: Loss) -> tuple[Tensor, Tensor]:
    """The number of tokens of each row that the model reads once for all rows that have them, and the first of these
    rows. They are those up to the first target with an influence on the loss."""
    counts, firsts, known = [], [], dict[tuple[bytes, bytes], int]()
    for tokens, inputs in rows:
        weighs = torch.ones(1, 1, dtype=torch.bool)
        if loss.ignores:
            weighs = torch.stack([inputs[name] != 0 for name in loss.ignores]).any(dim=0).reshape(len(tokens), -1)
        first = int(weighs.any(dim=1).to(torch.uint8).argmax())  # 0 without any: such a row shares nothing
        prompt = tokens[: first + 1].numpy().tobytes(), inputs[TARGETS][:first].numpy().tobytes()
        counts.append(first + 1)
        firsts.append(known.setdefault(prompt, len(firsts)))
    return torch.tensor(counts), torch.tensor(firsts)


def _checked(
    datum: Datum, name: str, loss: Loss, vocabulary: int, longest: int | None
) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = checked_tokens(datum.tokens, f"{name}.model_input", vocabulary, longest)
    name, needed = f"{name}.loss_fn_inputs", {TARGETS, *loss.inputs}
    if not needed <= datum.inputs.keys() <= needed | loss.optional.keys():
        taken = f"{', '.join(sorted(needed))}, and may have: {', '.join(loss.optional) or 'no others'}"
        raise ConfigError(f"{name} has {', '.join(sorted(datum.inputs)) or 'nothing'}: the loss needs {taken}.")
    inputs = {key: _tensor(value, f"{name}.{key}") for key, value in datum.inputs.items()}
    targets = inputs[TARGETS]
    if targets.is_floating_point() or bool(((targets < 0) | (targets >= vocabulary)).any()):
        raise ConfigError(f"{name}.{TARGETS} has ids that are no tokens: expected 0 to {vocabulary - 1}.")
    if targets.dim() not in (1, 1 if loss.inputs else 2) or 0 in targets.shape:
        raise ConfigError(f"{name}.{TARGETS} has shape {[*targets.shape]}: expected [N]; cross_entropy takes [N K].")
    inputs |= {key: torch.full(targets.shape, value) for key, value in loss.optional.items() if key not in inputs}
    for key, x in inputs.items():
        if x.shape != targets.shape or len(x) != len(tokens):
            raise ConfigError(
                f"{name}.{key} has shape {[*x.shape]}: expected an entry for each of {len(tokens)} tokens of the model "
                f"input, as {TARGETS} with shape {[*targets.shape]}."
            )
        inputs[key] = x.to(torch.int64) if key == TARGETS else x if x.is_floating_point() else x.to(torch.float32)
        if not bool(torch.isfinite(inputs[key]).all()):
            raise ConfigError(f"{name}.{key} has numbers that are not finite.")
    return tokens, inputs


def checked_tokens(tokens: Sequence[int], name: str, vocabulary: int, longest: int | None) -> Tensor:
    """Token ids as a tensor [N].

    Raises:
        ConfigError: there are none, too many, or ids outside of the vocabulary.
    """
    ids = _tensor(tokens, name)
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point():
        raise ConfigError(f"{name} is no list of token ids, or an empty one: give at least one.")
    if longest is not None and len(ids) > longest:
        raise ConfigError(f"{name} has {len(ids)} tokens: the model reads at most {longest}.")
    if bool(((ids < 0) | (ids >= vocabulary)).any()):
        raise ConfigError(f"{name} has ids that are no tokens: expected 0 to {vocabulary - 1}.")
    return ids.to(torch.int64)


def _tensor(value: Any, name: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} is no tensor of numbers ({error}).") from error
