"""Rows of a batch: prompts [b P], padded on the left, and responses [b T], padded on the right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.errors import RolloutError
from verl.model_paths.images import KEYS, MEDIA, RowMedia, with_media
from verl.protocol import DataProto
from verl.protocol.ragged import Ragged
from verl.rollout.base import TurnEngine, TurnResult

LARGEST_LOG_PROB = 1e-3  # nats above 0 that may be rounding; more is not a log-prob
PLACEHOLDER = -9000.0  # nats: values at or below are minus infinity, such as the -9999 of some servers


def prompt_tokens(prompts: DataProto) -> list[list[int]]:
    """Token ids of each prompt, without padding."""
    return masked_rows(prompts["prompts"], prompts["prompt_mask"])


def media_fields(media: Sequence[RowMedia], has_keys: bool = False) -> DataProto:
    """The inverse of `row_media`: fields of rows; none if no row has images, or with `has_keys` the digests alone."""
    like = next((x for _, x in media if x is not None), {})
    if not like and not has_keys:
        return DataProto()
    absent = {name: x[:0] for name, x in like.items()}
    ragged = {f"{MEDIA}{name}": Ragged.of([(x or absent)[name] for _, x in media]) for name in like}
    return DataProto.from_dict({KEYS: torch.tensor([key for key, _ in media])}, ragged=ragged)


def masked_rows(values: Tensor, mask: Tensor) -> list[list[int]]:
    """The values [b t] of each row on its mask [b t] bool; by numpy, whose rows cost a tenth of torch's."""
    return [row[on].tolist() for row, on in zip(values.numpy(), mask.numpy(), strict=True)]


def longest_prompt(batches: Sequence[DataProto]) -> int:
    """Tokens of the longest prompt."""
    return max((int(part["prompt_mask"].sum(dim=1).max()) for part in batches if len(part)), default=0)


def left_padded(lines: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids [b P] and their mask, padded on the left."""
    width = max(map(len, lines), default=0)
    tokens = torch.full((len(lines), width), pad_id, dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for ids, is_token, line in zip(tokens.numpy(), mask.numpy(), lines, strict=True):
        ids[width - len(line) :] = line
        is_token[width - len(line) :] = True
    return tokens, mask


def right_padded(lines: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
    """Lists of numbers as [b T], padded on the right to the longest."""
    padded = torch.full((len(lines), max(map(len, lines), default=0)), fill, dtype=dtype)
    for row, line in zip(padded.numpy(), lines, strict=True):
        row[: len(line)] = line
    return padded


def assemble(
    prompts: DataProto,
    num_samples: int,
    responses: Tensor,
    mask: Tensor,
    log_probs: Tensor,
    pad_id: int,
    attended: Tensor | None = None,
    routed: Tensor | None = None,
    sample_ids: Tensor | None = None,
) -> DataProto:
    """Join prompts and their responses into the rows that training reads.

    Args:
        prompts: `prompts`, `prompt_mask` [b P], `prompt_ids`, `group_ids` [b].
        responses, mask, log_probs: [b * num_samples, T]; samples of a prompt are consecutive.
        pad_id: token id of padding.
        attended: [b * num_samples, T], True on all tokens of the response, including those that the policy did not
            sample; None if it sampled all of them.
        routed: [b * num_samples, T layers k], experts of each token, -1 off the mask; None if not recorded.
        sample_ids: [b * num_samples]; None to count them.
    Returns:
        B = b * num_samples rows with the fields of prompts, and `sample_ids`, `input_ids`, `attention_mask`,
        `position_ids`, `responses`, `response_mask`, `rollout_log_probs`; T is the longest response.
    Raises:
        RolloutError: a log-prob is invalid or a token id is negative; names prompt, sample and token.
    """
    attended = mask if attended is None else attended
    width = int(attended.sum(dim=1).max()) if attended.numel() else 0
    mask, attended = mask[:, :width], attended[:, :width]
    responses = responses[:, :width].masked_fill(~attended, pad_id)
    names = with_media(["prompts", "prompt_mask", "prompt_ids", "group_ids"], prompts)
    rows = prompts.select(names, ragged_keys=[]).repeat(num_samples)
    assembled = DataProto.from_dict(
        {
            "sample_ids": torch.arange(num_samples).repeat(len(prompts)) if sample_ids is None else sample_ids,
            **sequence_fields(rows.batch["prompts"], rows.batch["prompt_mask"], responses, attended),
            "responses": responses,
            "response_mask": mask,
            "rollout_log_probs": log_probs[:, :width].masked_fill(~mask, 0.0),
        }
    )
    if routed is not None:
        assembled = assembled.union(DataProto.from_dict({"routed_experts": routed[:, :width].clone()}))
    assembled = rows.union(assembled)
    refuse_wrong_responses(assembled)
    return assembled


def sequence_fields(prompts: Tensor, prompt_mask: Tensor, responses: Tensor, attended: Tensor) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `position_ids` [B S] of prompts [B P] and the tokens after them [B T]."""
    attention = torch.cat([prompt_mask, attended], dim=1).long()
    return {
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0),
    }


def assemble_turns(
    prompts: DataProto,
    sampled: Sequence[TurnResult],
    turns: TurnEngine,
    pad_id: int,
    num_samples: int = 1,
    sample_ids: Tensor | None = None,
) -> DataProto:
    """Rows of responses; see `assemble`.

    Args:
        sampled: the single turn of each response; samples of a prompt are consecutive.
        turns: the engine that generated them.
    Raises:
        RolloutError: a log-prob is invalid or a token id is negative; names prompt, sample and token.
    """
    responses = right_padded([turn.tokens for turn in sampled], pad_id, torch.int64)
    log_probs = right_padded([turn.log_probs for turn in sampled], 0.0, turns.dtype)
    lengths, routed = torch.tensor([len(turn.tokens) for turn in sampled], dtype=torch.int64), None
    mask = torch.arange(responses.shape[1]) < lengths[:, None]
    if turns.experts is not None:
        routed = torch.full((*responses.shape, *turns.experts), -1, dtype=torch.int16)
        for row, turn in enumerate(sampled):
            if turn.routed_experts is not None:
                routed[row, : len(turn.tokens)] = turn.routed_experts
    return assemble(prompts, num_samples, responses, mask, log_probs, pad_id, routed=routed, sample_ids=sample_ids)


def refuse_wrong_responses(rows: DataProto, num_tokens: int | None = None) -> None:
    """Check the responses of any engine.

    Args:
        rows: as of `assemble`.
        num_tokens: size of the model's vocabulary; None if the model is not known here.
    Raises:
        RolloutError: see `assemble`.
    """
    names = ("response_mask", "responses", "rollout_log_probs")
    if missing := [name for name in names if name not in rows.batch]:
        raise RolloutError(
            f"The rollout engine gives rows without {', '.join(missing)}: see verl.rollout.rows.assemble."
        )
    mask, tokens, log_probs = (rows.batch[name] for name in names)
    if not bool(mask.any()):
        return
    lowest, highest = log_probs[mask].aminmax()  # one pass: nan propagates
    if not (float(lowest) > PLACEHOLDER and float(highest) <= LARGEST_LOG_PROB):
        exact = log_probs.double()
        is_wrong = ~((exact > PLACEHOLDER) & (exact <= LARGEST_LOG_PROB)) & mask
        row, position = is_wrong.nonzero()[0].tolist()
        fault = log_prob_fault(float(exact[row, position]))
        raise RolloutError(f"{_of_token(rows, row, position)} has the log-prob {fault}. {_count(is_wrong, mask)}")
    lowest, highest = tokens[mask].aminmax()
    if int(lowest) < 0 or (num_tokens is not None and int(highest) >= num_tokens):
        is_wrong = ((tokens < 0) | (tokens >= (num_tokens or int(highest) + 1))) & mask
        row, position = is_wrong.nonzero()[0].tolist()
        known = "no id is negative" if num_tokens is None else f"the model knows 0 to {num_tokens - 1}"
        raise RolloutError(
            f"{_of_token(rows, row, position)} is not a token: {known}. {_count(is_wrong, mask)} Does the engine run "
            "with the actor's tokenizer?"
        )


def log_prob_fault(log_prob: float) -> str | None:
    """Why a number cannot be the log-prob of a sampled token, with the number; None if it can."""
    if PLACEHOLDER < log_prob <= LARGEST_LOG_PROB:
        return None
    return (
        f"{log_prob:g}, and a token that was drawn has a finite one of at most 0 (-9999 stands for a probability of "
        "zero). Log-probs must be log_softmax(logits / temperature) over the whole vocabulary, of the tokens drawn"
    )


def _of_token(rows: DataProto, row: int, index: int) -> str:
    prompt, sample = int(rows["prompt_ids"][row]), int(rows["sample_ids"][row])
    length, token = int(rows["response_mask"][row].sum()), int(rows["responses"][row, index])
    return (
        f"The rollout engine's response to prompt {prompt}, sample {sample}: token {index + 1} of {length}, id {token},"
    )


def _count(is_wrong: Tensor, mask: Tensor) -> str:
    return f"{int(is_wrong.sum())} such of {int(mask.sum())} tokens."
