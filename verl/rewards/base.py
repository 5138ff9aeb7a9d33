"""Base class of rewards, which score texts, placement of a score on tokens, and validation of a reward function.

Validation covers its keyword arguments and its result; errors name the sample at fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from verl.component import Description, component
from verl.errors import RewardError
from verl.ops.masking import last_true
from verl.protocol import DataProto
from verl.protocol.provenance import Source, source_of
from verl.rewards.deadline import BATCH_TIMEOUT_S, CallFailed, call_within

# Scores are stored as float32; values that overflow it count as not finite.
LARGEST = float(np.finfo(np.float32).max)
TEXT_COLUMNS = ("prompt_text", "response_text")


def checked_scores(
    result: Any, prompts: Sequence[str], responses: Sequence[str], function: Callable | Source
) -> np.ndarray:
    """Check the result of a reward function and convert it to B float64, nan for a response without a reward.

    Args:
        result: a sequence, array or tensor of B finite numbers, or None; bools count as 1 and 0.
        prompts, responses: B texts each, for the message.
        function: the function, for the message.
    Raises:
        RewardError: the result is anything else; names the first sample at fault with its texts, and the line where the
            function is defined.
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
        number = np.nan if item is None else _number(item)
        if item is not None and (number is None or not abs(number) <= LARGEST):
            description = f"{shown(item)}{f' of type {type(item).__name__}' if number is None else ''}"
            raise reward_error(expected, description, function, prompts, responses, index)
        scores[index] = number
    return scores


def checked_result(
    result: Any, prompts: Sequence[str], responses: Sequence[str], function: Callable | Source
) -> RewardResult:
    """Check the result of a reward function; see `checked_scores`.

    Args:
        result: see `checked_scores`; items may also be mappings with a `score` and further values, or it may be one
            mapping of such columns. Further numbers become `parts`, other values `columns`.
    Raises:
        RewardError: see `checked_scores`; or a column has the name of a metric of every reward.
    """
    if isinstance(result, (list, tuple)) and any(isinstance(item, Mapping) for item in result):
        rows = [{"score": item, **(item if isinstance(item, Mapping) else {})} for item in result]
        result = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    table = {"score": result, **(result if isinstance(result, Mapping) else {})}
    scored = RewardResult(checked_scores(table.pop("score"), prompts, responses, function), nan_is_none=True)
    for name, values in table.items():
        items = _items(values)
        if name in TAKEN or isinstance(items, str) or len(items) != len(responses):
            raise reward_error(f"columns of {len(responses)} items, not named {', '.join(TAKEN)}", name, function)
        numbers = [_number(item) for item in items]
        if [x for x in numbers if x is not None] and numbers.count(None) == items.count(None):
            scored.parts[name] = np.array(numbers, dtype=np.float64)  # None is nan
        else:
            scored.columns[name] = np.array([None if x is None else str(x) for x in items], dtype=object)
    return scored


TAKEN = ("mean", "std", "failed", "unscored")  # metrics `reward/NAME` of every reward
TOKEN_REWARDS = (
    "a DataProto with token_level_rewards [B T], or a tensor [B], [B T] or [B T-1], finite, and 0 where response_mask "
    "is False"
)


def checked_token_scores(
    result: Any, mask: torch.Tensor, prompts: Sequence[str], responses: Sequence[str], function: Callable | Source
) -> torch.Tensor:
    """Check and return the token-level rewards [B T] float32 in the result of a function of the batch.

    Args:
        result: a DataProto with `token_level_rewards`, or that tensor itself. [B T-1] covers all tokens but the first.
        mask: response_mask [B T].
        prompts, responses: B texts each, for the message.
        function: the function, for the message.
    Raises:
        RewardError: the rewards are missing, have another shape or type, are not finite, or not 0 on padding.
    """
    tensors = {"token_level_rewards": result} if isinstance(result, torch.Tensor) else getattr(result, "batch", None)
    if tensors is None:
        raise reward_error(TOKEN_REWARDS, f"{shown(result)} of type {type(result).__name__}", function)
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
            raise reward_error(TOKEN_REWARDS, described, function, prompts, responses, rows[0])
    return scores


def reward_error(
    expected: str,
    found: str,
    function: Callable | Source,
    prompts: Sequence[str] = (),
    responses: Sequence[str] = (),
    sample: int | None = None,
) -> RewardError:
    """The error for an invalid result of a reward function."""
    source = source_of(function)
    lines = [f"The reward function {source.function}() failed.", f"  Expected: {expected}", f"  Found: {found}"]
    if sample is not None:
        lines.append(f"  Sample: {sample}, prompt {shown(prompts[sample])}, response {shown(responses[sample])}")
    lines.append(f"  Source: {source}")
    return RewardError("\n".join(lines))


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
        return f"a {type(result).__name__}, {shown(result)}"
    if hasattr(result, "__array__"):
        array = np.asarray(result)
        return array.tolist() if array.ndim == 1 else f"an array of shape {list(array.shape)}"
    if isinstance(result, Sequence):
        return list(result)
    return f"{shown(result)} of type {type(result).__name__}"


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


def shown(value: Any) -> str:
    """A value for a message: its beginning, and its end if it is long."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


def refuse_missing_arguments(
    accepted: Mapping[str, bool] | None, names: Sequence[str], function: Callable | Source
) -> None:
    """Check that a function takes the arguments that are always passed; see `check_columns`.

    Raises:
        RewardError: the function does not take one of them.
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
        given: arguments that are passed in addition to columns.
        function: the function, for the message.
    Raises:
        RewardError: an argument without a default is neither a column nor given.
    """
    for name, needed in (accepted or {}).items():
        if needed and name not in (*given, *columns):
            present = ", ".join(columns) or "none"
            missing = f"no column {name!r} in the data. Its columns: {present}"
            raise reward_error(f"a column or a keyword argument {name!r}", missing, function)


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch, and their components.

    Attributes:
        scores: [B] float64.
        token_scores: [B T] float32, for a reward that scores single tokens; each row sums to its score. None for
            others.
        parts: components by name, [B] floats each: logged as metric `reward/NAME` (mean) and as a column of sample
            tables.
        columns: other values by name, [B] each, such as texts: a column `reward_NAME` of the sample tables.
        counts: numbers whose sum is the metric `reward/NAME` of a training step; for seconds, `NAME_s`, the metrics are
            the percentiles `NAME_p50_s` and `NAME_p95_s`.
        inner: results of `Reward.prepare` of each part, for a reward that combines others.
        nan_is_none: whether a score of nan means no reward, so that the response is left out; otherwise it is an error.
    """

    scores: np.ndarray
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    token_scores: torch.Tensor | None = None
    counts: dict[str, list[float]] = field(default_factory=dict)
    inner: dict[str, RewardResult] = field(default_factory=dict)
    nan_is_none: bool = False

    @property
    def summands(self) -> np.ndarray:
        """The scores, with 0 where there is no reward."""
        return np.nan_to_num(self.scores) if self.nan_is_none else self.scores


@component
class RewardDescription(Description):
    """Base class of `reward=` components. A subclass builds a `Reward`, or is one.

    Attributes:
        is_model: whether it can run as the role `rm`, on its own devices.
    """

    is_model: ClassVar[bool] = False

    def columns_read(self) -> Iterator[tuple[str, str]]:
        """Yield (setting, column) for each column of the data that it requires, e.g. (`answer_key is 'answer'`,
        `answer`).
        """
        yield from ()


class Reward:
    """Base class of rewards. A subclass scores texts in `score`; this class checks scores and assigns them to tokens.

    A subclass that needs more than texts, such as lengths in tokens, overrides `score_batch` instead.

    Attributes:
        call_timeout_s: seconds for one batch, after which the call is interrupted; None for no deadline. A user's class
            without it gets 60 in a run.
        scores_ahead: whether a batch may be scored in a thread while the trainer works: scoring takes little of this
            process's time and does not use its random generators.
        scores_groups: whether a score does not depend on the responses to other prompts, and `parts` and `columns` have
            the same names for any responses. With `scores_ahead`, the responses to a prompt are then scored once all of
            them exist; otherwise those of a batch are.
    """

    call_timeout_s: float | None = None
    scores_ahead: bool = False
    scores_groups: bool = False

    def score(self, prompts: list[str], responses: list[str], **columns: list) -> Any:
        """Score B responses.

        Args:
            prompts, responses: B texts each.
            columns: all other columns of the data, B items each.
        Returns:
            B finite numbers, as a sequence, an array or a tensor, or None for no reward; see `checked_result`.
        """
        raise NotImplementedError

    @property
    def producer(self) -> Callable:
        """The function that error messages name as the source of the scores."""
        return self.score_batch if type(self).score is Reward.score else self.score

    def score_batch(self, batch: DataProto) -> RewardResult:
        """Score every response of a batch, without assigning scores to tokens."""
        prompts, responses, columns = texts_of(batch)
        if not len(batch):
            return RewardResult(np.zeros(0))
        return checked_result(self.score(prompts, responses, **columns), prompts, responses, self.producer)

    def score_in_time(self, batch: DataProto) -> RewardResult:
        """Call `score_batch` with the deadline `call_timeout_s`.

        Raises:
            RewardError: raised by `score_batch`, or the deadline has passed.
        """
        if self.call_timeout_s is None:
            return self.score_batch(batch)
        try:
            return call_within(self.call_timeout_s, lambda: self.score_batch(batch), source_of(self.producer).file)
        except CallFailed as late:
            raise reward_error("a score for each response", str(late), self.producer) from late

    def prepare(self, batch: DataProto) -> RewardResult:
        """Score responses ahead of time: the part of `score_in_time` without running statistics of scores."""
        return self.score_in_time(batch)

    def apply(self, result: RewardResult, batch: DataProto) -> RewardResult:
        """Apply running statistics of scores to the result of `prepare` for a batch, in the order of training; the
        result is that of `score_in_time` at this point."""
        return result

    def check_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Check the rows that a run will score, before weights are loaded.

        Args:
            name: of the rows, such as `training rows`.
            rows: mappings of columns.
        Returns:
            Sentences to show at the start of the run.
        Raises:
            ConfigError: rows that cannot be scored.
        """
        return []

    def frozen(self) -> AbstractContextManager[None]:
        """Context for evaluation, in which running statistics of scores, such as their mean, are not updated."""
        return contextlib.nullcontext()

    def reset_stats(self) -> None:
        """Reset running statistics of scores."""

    def state_dict(self) -> dict[str, Any]:
        """Running statistics of scores, as plain numbers and dicts; empty for most rewards."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def close(self) -> None:
        """Stop processes and connections. Called by the trainer at the end of a run; idempotent."""

    def score_tokens(self, batch: DataProto, result: RewardResult | None = None) -> DataProto:
        """Score every response of a batch.

        Args:
            batch: response_mask [B T]; `prompt_text`, `response_text` and the columns of the data.
            result: result of the batch; None calls `score_in_time`.
        Returns:
            token_level_scores [B T] float32: per-token scores of the reward, or the score on the last True of
            response_mask and 0 elsewhere (all 0 for a row with an empty mask). In `non_tensor_batch`: `score`, B
            floats, or None for no reward; `reward/NAME` for each part of the result and `reward_NAME` for each of its
            columns.
        Raises:
            RewardError: the reward raised, or did not return B finite numbers; with the sample and the function.
        """
        result = self.score_in_time(batch) if result is None else result
        placed, scores = token_scores_of(result, batch.batch["response_mask"]), result.scores.astype(object)
        scores[np.isnan(result.scores)] = None
        parts = {f"reward/{name}": values.astype(object) for name, values in result.parts.items()}
        columns = {f"reward_{name}": values for name, values in result.columns.items()}
        return DataProto.from_dict(
            tensors={"token_level_scores": placed},
            non_tensors={"score": scores, **parts, **columns},
            producer=self.producer,
        )


def in_time(reward: Reward, timeout_s: float | None = None) -> Reward:
    """Set the deadline of a user-defined reward: `timeout_s`, else that of its class, else 60 seconds per batch.

    Rewards of this package keep their own deadlines.
    """
    classes = [kind for kind in type(reward).__mro__ if not kind.__module__.startswith("verl.")]
    is_said = "call_timeout_s" in getattr(reward, "__dict__", ()) or any("call_timeout_s" in vars(x) for x in classes)
    if type(reward) in classes and isinstance(reward, Reward) and (timeout_s is not None or not is_said):
        object.__setattr__(reward, "call_timeout_s", BATCH_TIMEOUT_S if timeout_s is None else timeout_s)
    return reward


def token_scores_of(result: RewardResult, mask: torch.Tensor) -> torch.Tensor:
    """Per-token scores [B T] float32: those of the result, or each score on the last token of its response.

    Args:
        result: scores of the batch.
        mask: response_mask [B T].
    """
    if result.token_scores is not None:
        return result.token_scores.to(device=mask.device, dtype=torch.float32)
    last = last_true(mask)
    rows = torch.nonzero(last >= 0).squeeze(1)
    placed = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    placed[rows, last[rows]] = torch.tensor(result.summands).to(placed)[rows]
    return placed


def missing_columns(reward: Description, columns: Collection[str], where: str) -> Iterator[str]:
    """Yield a sentence for each column that a reward requires and the data lack, beginning with the reward's setting.

    Args:
        reward: the component.
        columns: columns of the data, without the prompt.
        where: the rows, for the sentence, such as `rows of data.files`.
    """
    if not isinstance(reward, RewardDescription):
        return
    for named_by, column in reward.columns_read():
        known = {"reward_model", "answer"} if column == "ground_truth" else {column}
        if not {column, *known} & {*columns, "prompt_messages", *TEXT_COLUMNS}:
            of_verl = {"ground_truth"} if "reward_model" in columns else set[str]()
            present = ", ".join(sorted({*columns} - {*TEXT_COLUMNS} | of_verl)) or "none but the prompt"
            yield f"{named_by}: the {where} have no column {column!r}. Their columns: {present}."


def texts_of(batch: DataProto) -> tuple[list[str], list[str], dict[str, list]]:
    """Prompts, responses and all other columns of a batch, B items each. `ground_truth` is the column of that name, or
    that entry of `reward_model`, as in verl's data, or the column `answer`.

    Raises:
        RewardError: the batch has no texts.
    """
    arrays = batch.non_tensor_batch
    if missing := [name for name in TEXT_COLUMNS if name not in arrays]:
        columns = ", ".join(arrays) or "no columns"
        raise RewardError(f"The batch has no {' and no '.join(missing)}: a reward reads texts. It has {columns}.")
    columns = {name: list(values) for name, values in arrays.items() if name not in TEXT_COLUMNS}
    truths = [x.get("ground_truth") if isinstance(x, Mapping) else None for x in columns.get("reward_model", ())]
    if any(x is not None for x in truths) or (truths := columns.get("answer", [])):
        columns.setdefault("ground_truth", truths)
    return list(arrays["prompt_text"]), list(arrays["response_text"]), columns
