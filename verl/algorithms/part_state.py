"""State of estimators and losses: what a checkpoint holds of it, and a trial that finds what no checkpoint would hold.

A part with `state_dict` and `load_state_dict`, or whose `build` gives an object with them, is saved and restored
(`PartState`). Anything else that keeps state is refused (`state_fault`), since a resumed run would go on with other
numbers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from verl.algorithms.functions import FunctionFailed, FunctionPart
from verl.component import BuildContext, Description
from verl.errors import ConfigError, DataProtoValidationError
from verl.protocol import DataProto

ROWS, TOKENS = 4, 6  # of the batch that `state_fault` tries; rows of two prompts
_OURS = ("verl.", "pydantic", "builtins")
_METHODS = ("state_dict", "load_state_dict")


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
    return copied_state(part).build(context)


def copied_state(part: Any) -> Any:
    """A copy of a part with state, to go back to; the part itself where it has none."""
    return copy.deepcopy(part) if keeps_state(part) else part


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
