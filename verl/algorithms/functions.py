"""A function of a user as the advantage or the policy loss of an algorithm, by its path:

    algorithm.advantage={path: my.py:advantage}    def advantage(batch, **kwargs) -> advantages
    algorithm.policy_loss={path: my.py:loss}       def loss(log_probs, batch, **kwargs) -> loss

The function is imported once in each process. Its file is part of the identity of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from verl.algorithms.advantages import AdvantageEstimator, per_response
from verl.algorithms.losses import PolicyLoss
from verl.component import Description, component
from verl.errors import ConfigError, VerlError
from verl.ops.masking import masked_sum
from verl.protocol import DataProto
from verl.protocol.import_path import load_function, own_line, path_faults
from verl.utils.signals import raised_by_code


class FunctionFailed(VerlError, RuntimeError):
    """A function of a user raised an error, which is the cause of this one."""


_imported: dict[str, Callable[..., Any]] = {}


@component
class FunctionPart(Description):
    """A part of the algorithm that calls a function.

    Args:
        path: `file.py:function`, the file relative to the working directory, or `package.module:function`.
        kwargs: further keyword arguments of every call.
    Attributes:
        where: configuration path of the part, for messages.
        arguments: what the function is called with, by keyword.
    """

    example_values: ClassVar[Mapping[str, str]] = {"path": "my.py:loss"}
    where: ClassVar[str] = ""
    arguments: ClassVar[tuple[str, ...]] = ()

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def faults(self) -> Iterator[str]:
        for name in self.arguments:
            if name in self.kwargs:
                yield f"kwargs.{name}: the function already receives an argument of this name. Choose another name."
        faults = list(path_faults(self.path, self.kwargs, self.arguments, others=""))
        if not faults:
            _imported.pop(self.path, None)  # a notebook may have changed the file since
            try:
                self.function  # noqa: B018
            except ConfigError as error:
                faults = list(error.faults)
        yield from faults

    @property
    def function(self) -> Callable[..., Any]:
        """The function, imported when it is first asked for."""
        if self.path not in _imported:
            _imported[self.path] = load_function(self.path, ConfigError)
        return _imported[self.path]

    def _call(self, **arguments: Any) -> Any:
        try:
            return self.function(**arguments, **self.kwargs)
        except BaseException as error:  # user code may raise anything
            if not raised_by_code(error):
                raise
            what = f"raised {type(error).__name__}: {error}{own_line(error, self.function)}"
            raise FunctionFailed(f"{self.where}.path is {self.path!r}: the function {what}") from error

    def _refuse(self, result: Any, expected: str) -> NoReturn:
        got = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise ConfigError(f"{self.where}.path is {self.path!r}: the function returned {got}, expected {expected}.")


@component
class AdvantageFunction(FunctionPart, AdvantageEstimator):
    """An advantage estimator by a function:

        def advantage(batch, **kwargs) -> Tensor

    `batch` is a DataProto with token_level_rewards [B T], response_mask [B T], group_ids [B] and whatever else the run
    computes. The function returns advantages, [B] for whole responses or [B T]; as a pair with returns of the same
    shape if there is a critic; or a DataProto of both. Without returns they are the summed rewards of each response.

    Args:
        needs_values: whether the function reads `values`, so that the run needs a critic.
        needs_groups: whether it compares the responses to one prompt, so that a prompt needs several.
    """

    where: ClassVar[str] = "algorithm.advantage"
    arguments: ClassVar[tuple[str, ...]] = ("batch",)

    needs_values: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    needs_groups: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]

    @torch.no_grad()
    def __call__(self, batch: DataProto) -> DataProto:
        mask, result = batch["response_mask"], self._call(batch=batch)
        if isinstance(result, DataProto) and {"advantages", "returns"} <= set(result.batch):
            result = result["advantages"], result["returns"]
        scores = masked_sum(batch["token_level_rewards"], mask, dim=-1)
        pair = result if isinstance(result, tuple) and len(result) == 2 else (result, scores)
        made = [self._of_tokens(values, mask) for values in pair]
        return DataProto.from_dict(dict(zip(("advantages", "returns"), made, strict=True)))

    def _of_tokens(self, values: Any, mask: Tensor) -> Tensor:
        if not isinstance(values, Tensor) or values.shape not in (mask.shape, mask.shape[:1]):
            self._refuse(values, f"advantages of shape {list(mask.shape[:1])} or {list(mask.shape)}")
        if values.ndim == 1:
            return per_response(values, values, mask)["advantages"]
        return torch.where(mask, values, 0.0)


@component
class LossFunction(FunctionPart, PolicyLoss):
    """A policy loss by a function:

        def loss(log_probs, batch, **kwargs) -> Tensor

    It gets and returns what `PolicyLoss.__call__` does: the loss of each token [B T], alone or with a dict of
    statistics [B T], whose means over the tokens are metrics. Values off the response mask are ignored.
    """

    where: ClassVar[str] = "algorithm.policy_loss"
    arguments: ClassVar[tuple[str, ...]] = ("log_probs", "batch")

    def __call__(self, log_probs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mask, result = batch["response_mask"], self._call(log_probs=log_probs, batch=batch)
        loss, stats = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        for value in (loss, *(stats.values() if isinstance(stats, dict) else [stats])):
            if not isinstance(value, Tensor) or value.shape != mask.shape:
                self._refuse(value, f"a loss, and statistics in a dict, of shape {list(mask.shape)}")
        assert isinstance(loss, Tensor)  # which the loop has checked
        return torch.where(mask, loss, 0.0), {name: torch.where(mask, x.detach(), 0.0) for name, x in stats.items()}
