"""Functions of a user as the advantage or the policy loss of an algorithm, and the state that such parts keep.

    algorithm.advantage={path: my.py:advantage}    def advantage(batch, **kwargs) -> advantages
    algorithm.policy_loss={path: my.py:loss}       def loss(log_probs, batch, **kwargs) -> loss

The function is imported once in each process. Its file is part of the identity of a run.

A part with `state_dict` and `load_state_dict`, or whose `build` gives an object with them, is saved and restored
(`PartState`). Anything else that keeps state is found by a trial and refused (`state_fault`), since a resumed run would
go on with other numbers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from verl.algorithms.advantages import AdvantageEstimator, per_response
from verl.algorithms.losses import PolicyLoss
from verl.component import BuildContext, Description, component
from verl.errors import ConfigError, DataProtoValidationError, VerlError, error_text
from verl.ops.masking import masked_sum
from verl.protocol import DataProto
from verl.protocol.user_function import load_function, own_line, path_faults
from verl.utils.signals import RAISED_BY_CODE

ROWS, TOKENS = 4, 6  # of the batch that `state_fault` tries; rows of two prompts
_OURS = ("verl.", "pydantic", "builtins")
_METHODS = ("state_dict", "load_state_dict")
TAKEN = {"loss", "grad_norm", "lr", "kl_loss", "entropy"}  # metrics `actor/NAME` of every run


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
        except RAISED_BY_CODE as error:  # user code may raise anything
            what = f"raised {error_text(error)}{own_line(error, self.function)}"
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
        mask, result = batch["response_mask"], self._call(batch=copy.deepcopy(batch))  # which it may change
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
        given = {name: x.clone() for name, x in batch.items()}  # which it may change
        mask, result = batch["response_mask"], self._call(log_probs=log_probs, batch=given)
        loss, stats = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        for value in (loss, *(stats.values() if isinstance(stats, dict) else [stats])):
            if not isinstance(value, Tensor) or value.shape != mask.shape:
                self._refuse(value, f"a loss, and statistics in a dict, of shape {list(mask.shape)}")
        if taken := sorted(TAKEN & stats.keys()):
            why = f"the function returned a statistic {taken[0]!r}, a metric of every update. Choose another name"
            raise ConfigError(f"{self.where}.path is {self.path!r}: {why}.")
        assert isinstance(loss, Tensor)  # which the loop has checked
        if log_probs.requires_grad and not loss.requires_grad and batch["advantages"].any():
            self._refuse(loss, "a loss with a gradient: compute it from log_probs, without detach() or item()")
        return torch.where(mask, loss, 0.0), {name: torch.where(mask, x.detach(), 0.0) for name, x in stats.items()}


def state_fault(part: Any, name: str) -> str | None:
    """The fault of an estimator or loss whose state no checkpoint would hold; None if none was found.

    It is called twice on one small batch with one seed. It has state if its second result differs, or if a call changes
    its attributes, those of its class, or the variables of its module and closures that its methods name. One with
    `state_dict` must give its first result again after `load_state_dict`.

    Args:
        part: an advantage estimator, a policy loss or a value loss; those of this package are not tried.
        name: its field, which the fault begins with.
    """
    running, run = part, _estimate if name == "advantage" else _loss
    if not type(part).__module__.startswith(_OURS):
        with contextlib.suppress(Exception):  # it needs a tokenizer, for example
            running = built_part(part, BuildContext())
    if keeps_state(running):
        fault = _not_restored(running, run)
        return fault and f"{name} is {type(part).__name__}: {fault}."
    kinds = [kind for kind in type(running).__mro__ if not kind.__module__.startswith(_OURS)]
    functions = [part.function] if isinstance(part, FunctionPart) else [x for kind in kinds for x in _functions(kind)]
    if not functions and not kinds:
        return None
    try:
        fault = _by_calls(running, run, kinds, functions) or _by_methods(running, functions)
    except ConfigError as error:  # what a function returned cannot be
        return error.faults[0].removeprefix("algorithm.")
    if fault is None:
        return None
    named = part.path if isinstance(part, FunctionPart) else type(part).__name__
    return (
        f"{name} is {named}: {fault}. A checkpoint does not hold that, so that a resumed run would go on "
        "with other numbers. Compute everything from the batch that each call gets, or write a class with state_dict "
        "and load_state_dict."
    )


def keeps_state(part: Any) -> bool:
    """Whether a checkpoint holds the state of a part, as it was built."""
    return all(callable(getattr(part, method, None)) for method in _METHODS)


def built_part(part: Description, context: BuildContext) -> Any:
    """The running object of an estimator or loss; a description with state of its own is copied, for this run alone."""
    return (copy.deepcopy(part) if keeps_state(part) else part).build(context)


class PartState:
    """State of a running estimator or loss in a checkpoint, as plain values.

    Args:
        name: its configuration path, for messages.
    """

    def __init__(self, part: Any, name: str):
        self._part, self._name = part, name

    def state_dict(self) -> dict[str, Any]:
        """A copy.

        Raises:
            ConfigError: JSON would not give the same values back.
        """
        state, plain = self._part.state_dict(), None
        try:
            plain = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            why = str(error)
        else:
            why = "keys must be texts, and sequences lists"
        if not isinstance(state, dict) or not isinstance(plain, dict) or plain != state:
            raise ConfigError(
                f"{self._name} is {type(self._part).__name__}: its state_dict must be a dict of numbers, texts, lists "
                f"and dicts ({why}). Give x.tolist() for a tensor x."
            )
        return plain

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is loaded where the checkpoint has nothing."""
        if state:
            self._part.load_state_dict(state)


def _not_restored(part: Any, run: Callable[..., Mapping[str, torch.Tensor]]) -> str | None:
    """The fault of the state of a part that has `state_dict`; None if there is none."""
    state = PartState(part, "it")
    try:
        before = state.state_dict()
        first = run(part)
        run(part)
        part.load_state_dict(before)
        again = run(part)
        part.load_state_dict(before)
    except ConfigError as error:
        return error.faults[0].rstrip(".")
    except Exception:  # noqa: BLE001 - it needs columns of the run's own data, for example
        return None
    changed = [key for key, x in first.items() if not torch.equal(x.nan_to_num(), again[key].nan_to_num())]
    return f"after load_state_dict of an earlier state one batch gives other {changed[0]}" if changed else None


def _by_calls(
    part: Any, run: Callable[..., Mapping[str, torch.Tensor]], kinds: list[type], functions: list[Any]
) -> str | None:
    before = _variables(part, kinds, functions)
    try:
        first, second = run(part), run(part)
    except dataclasses.FrozenInstanceError as error:
        return f"it sets an attribute of itself ({error}), and it is frozen"
    except (ConfigError, FunctionFailed) as error:
        if isinstance(error, ConfigError) or not isinstance(error.__cause__, (LookupError, DataProtoValidationError)):
            raise ConfigError(str(error)) from error
        first = second = {}
    except (Exception, SystemExit):  # noqa: BLE001 - it needs columns of the run's own data, for example
        first = second = {}
    after = _variables(part, kinds, functions)
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if changed:
        return f"a call changes {', '.join(changed[:3])}"
    for key, x in first.items():
        if not torch.equal(x.nan_to_num(), second[key].nan_to_num()):
            return f"two calls with one batch give different {key}"
    return None


def _by_methods(part: Any, functions: list[Any]) -> str | None:
    """State that a trial may not reach, from the code of the methods."""
    if any(hasattr(part, method) for method in _METHODS):
        return f"it has only one of {' and '.join(_METHODS)}"
    setting = (x for x in functions if "__setattr__" in getattr(getattr(x, "__code__", None), "co_names", ()))
    return next((f"its {method.__name__} sets attributes with __setattr__" for method in setting), None)


def _functions(kind: type) -> Iterator[Any]:
    """The functions that a class was written with, not those that pydantic and dataclasses made."""
    for name, value in vars(kind).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isfunction(function) and (name == "__call__" or not name.startswith("__")):
            yield function


def _variables(part: Any, kinds: list[type], functions: list[Any]) -> dict[str, bytes]:
    """Content of whatever may hold state, by a name for messages."""
    values: dict[str, Any] = {f"self.{key}": value for key, value in getattr(part, "__dict__", {}).items()}
    for kind in kinds:
        values |= {f"{kind.__name__}.{key}": value for key, value in vars(kind).items() if not key.startswith("__")}
    functions = list(filter(inspect.isfunction, map(inspect.unwrap, functions)))
    for function in functions:  # and those of the same file that it calls
        variables = inspect.getclosurevars(function)
        named = {**variables.globals, **variables.nonlocals}
        values |= named
        called = (x for x in named.values() if inspect.isfunction(x) and x.__module__ == function.__module__)
        functions += [x for x in called if x not in functions]
    return {key: text for key, value in values.items() if (text := _content(value)) is not None}


def _content(value: Any) -> bytes | None:
    if callable(value) and not hasattr(value, "__dict__"):
        return None
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001 - modules, and what else cannot be copied
        return None


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[1, 4:] = False
    numbers = ("token_level_rewards", "values", "returns", "advantages", "old_log_probs", "ref_log_probs")
    tensors = {name: torch.randn(ROWS, TOKENS, generator=generator) * mask for name in numbers}
    return {**tensors, "rollout_log_probs": tensors["old_log_probs"] - 0.01 * mask, "response_mask": mask}


@torch.random.fork_rng(devices=[])
def _estimate(estimator: Callable[[DataProto], DataProto]) -> Mapping[str, torch.Tensor]:
    torch.manual_seed(0)
    groups = {"group_ids": torch.arange(ROWS) // 2, "prompt_ids": torch.arange(ROWS) // 2}
    batch = DataProto.from_dict({**_tensors(), **groups, "greedy_scores": torch.zeros(ROWS, dtype=torch.float64)})
    return dict(estimator(batch).batch)


@torch.random.fork_rng(devices=[])
def _loss(loss: Callable[..., tuple[torch.Tensor, Any]]) -> Mapping[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = _tensors()
    trained = (tensors["old_log_probs"] + 0.1 * tensors["response_mask"]).requires_grad_()
    return {"loss": loss(trained, copy.copy(tensors))[0].detach()}
