"""Validation of a reward function: its keyword arguments, and its result; errors name the sample at fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.errors import NonFiniteRewardError, RewardError
from verl.protocol.provenance import Source, source_of

# Scores are stored as float32; values that overflow it count as not finite.
LARGEST = float(np.finfo(np.float32).max)


def checked_scores(
    result: Any, prompts: Sequence[str], responses: Sequence[str], function: Callable | Source
) -> np.ndarray:
    """Check the result of a reward function and convert it to B float64.

    Args:
        result: a sequence, array or tensor of B finite numbers; bools count as 1 and 0.
        prompts, responses: B texts each, for the message.
        function: the function, for the message.
    Raises:
        RewardError: it is anything else. Names what was expected and found, the first sample at fault with its texts,
            and the line where the function is defined. NonFiniteRewardError for a number that is not finite.
    """
    count = len(responses)
    expected = f"{count} finite numbers, one for each response"
    items = _items(result)
    if isinstance(items, str):
        raise reward_error(expected, items, function)
    if len(items) != count:
        # Names the first sample without a score.
        sample = len(items) if len(items) < count else None
        raise reward_error(expected, f"{len(items)} items", function, prompts, responses, sample)
    scores = np.empty(count, dtype=np.float64)
    for index, item in enumerate(items):
        number = _number(item)
        if number is None or not abs(number) <= LARGEST:
            description = f"{_shortened(item)}{f' of type {type(item).__name__}' if number is None else ''}"
            error = reward_error(expected, description, function, prompts, responses, index)
            raise error if number is None else NonFiniteRewardError(str(error), _not_finite(items))
        scores[index] = number
    return scores


TOKEN_REWARDS = (
    "a DataProto with token_level_rewards [B T], or a tensor [B], [B T] or [B T-1], finite, and 0 where response_mask "
    "is False"
)


def checked_token_scores(
    result: Any, mask: torch.Tensor, prompts: Sequence[str], responses: Sequence[str], function: Callable | Source
) -> torch.Tensor:
    """Check and return the token-level rewards [B T] float32 in the result of a function of the batch.

    Args:
        result: a DataProto with `token_level_rewards`, or that tensor itself. One of [B T-1] is of all tokens but the
            first.
        mask: response_mask [B T].
        prompts, responses: B texts each, for the message.
        function: the function, for the message.
    Raises:
        RewardError: they are missing, have another shape or type, or are not 0 on padding. NonFiniteRewardError where
            they are not finite.
    """
    tensors = {"token_level_rewards": result} if isinstance(result, torch.Tensor) else getattr(result, "batch", None)
    if tensors is None:
        raise reward_error(TOKEN_REWARDS, f"{_shortened(result)} of type {type(result).__name__}", function)
    tensor = tensors["token_level_rewards"] if "token_level_rewards" in tensors.keys() else None  # noqa: SIM118
    if not isinstance(tensor, torch.Tensor):
        present = ", ".join(sorted(tensors.keys())) or "none"
        raise reward_error(TOKEN_REWARDS, f"no token_level_rewards. Its fields: {present}", function)
    if tensor.dim() == 2 and tensor.shape[0] == mask.shape[0] and tensor.shape[1] + 1 == mask.shape[1]:
        tensor = torch.nn.functional.pad(tensor, (1, 0))
    if tensor.shape != mask.shape or tensor.is_complex():
        shape = f"expected {list(mask.shape)}, the shape of response_mask"
        raise reward_error(TOKEN_REWARDS, f"a {tensor.dtype} tensor of shape {list(tensor.shape)}; {shape}", function)
    scores = tensor.detach().to(device=mask.device, dtype=torch.float32)
    for wrong, words in (
        (~torch.isfinite(scores), "a number that is not finite"),
        ((scores != 0) & ~mask.bool(), "a number where response_mask is False"),
    ):
        if rows := torch.nonzero(wrong.any(dim=1)).flatten().tolist():
            position = int(torch.nonzero(wrong[rows[0]]).flatten()[0])
            described = f"{words}, {scores[rows[0], position].item():g} at position {position} of the response"
            error = reward_error(TOKEN_REWARDS, described, function, prompts, responses, rows[0])
            raise NonFiniteRewardError(str(error), rows) if "finite" in words else error
    return scores


def reward_error(
    expected: str,
    found: str,
    function: Callable | Source,
    prompts: Sequence[str] = (),
    responses: Sequence[str] = (),
    sample: int | None = None,
) -> RewardError:
    """Make the error for an invalid result of a reward function."""
    source = source_of(function)
    lines = [f"The reward function {source.function}() failed.", f"  Expected: {expected}", f"  Found: {found}"]
    if sample is not None:
        lines.append(
            f"  Sample: {sample}, prompt {_shortened(prompts[sample])}, response {_shortened(responses[sample])}"
        )
    lines.append(f"  Source: {source}")
    return RewardError("\n".join(lines))


def _not_finite(items: list) -> list[int]:
    numbers = [_number(item) for item in items]
    return [row for row, number in enumerate(numbers) if number is not None and not abs(number) <= LARGEST]


def _items(result: Any) -> list | str:
    """The items of a result as a list, or a description of a result without items."""
    if isinstance(result, torch.Tensor):
        if result.dim() != 1:
            return f"a tensor of shape {list(result.shape)}"
        result = result.detach().cpu()
        return (result.double() if result.is_floating_point() else result).tolist()
    if result is None:
        return "None"
    if isinstance(result, (str, bytes, dict, set)):
        return f"a {type(result).__name__}, {_shortened(result)}"
    if hasattr(result, "__array__"):
        array = np.asarray(result)
        return array.tolist() if array.ndim == 1 else f"an array of shape {list(array.shape)}"
    if isinstance(result, Sequence):
        return list(result)
    return f"{_shortened(result)} of type {type(result).__name__}"


def _number(item: Any) -> float | None:
    """The item as a float, or None if it is not a single real number."""
    if isinstance(item, (bool, int, float, np.bool_, np.integer, np.floating)):
        try:
            return float(item)
        except OverflowError:
            return float("inf")
    if isinstance(item, (torch.Tensor, np.ndarray)) and item.ndim == 0:
        return _number(item.item())
    return None


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


def refuse_missing_arguments(
    accepted: Mapping[str, bool] | None, names: Sequence[str], function: Callable | Source
) -> None:
    """Check that a function takes the arguments that it is always called with; see `check_columns`.

    Raises:
        RewardError: it does not take one of them.
    """
    for name in names:
        if accepted is not None and name not in accepted:
            raise reward_error(f"a function that takes `{name}`", f"it takes {', '.join(accepted)}", function)


def check_columns(
    accepted: Mapping[str, bool] | None, columns: Mapping[str, list], given: Sequence[str], function: Callable | Source
) -> None:
    """Check that the data has the columns that a function requires.

    Args:
        accepted: keyword arguments of the function, see `Signature`.
        columns: columns of the data.
        given: arguments that are passed besides columns.
        function: the function, for the message.
    Raises:
        RewardError: an argument without a default is neither a column nor given.
    """
    for name, needed in (accepted or {}).items():
        if needed and name not in (*given, *columns):
            present = ", ".join(columns) or "none"
            missing = f"no column {name!r} in the data. Its columns: {present}"
            raise reward_error(f"a column or a keyword argument {name!r}", missing, function)
