"""Finds advantage estimators and losses of users that keep state of their own, which no checkpoint would hold.

An estimator or loss is called twice on one small batch with one seed. It has state if its second result differs, or if
a call changes its attributes, those of its class, or the variables of its module and closures that its methods name.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from verl.protocol import DataProto

ROWS, TOKENS = 4, 6  # of the batch; rows of two prompts
_OURS = ("verl.", "pydantic", "builtins")


def state_fault(part: Any, name: str) -> str | None:
    """The fault of an estimator or loss that has state; None if none was found.

    Args:
        part: an advantage estimator, a policy loss or a value loss; those of this package are not tried.
        name: its field, which the fault begins with.
    """
    kinds = [kind for kind in type(part).__mro__ if not kind.__module__.startswith(_OURS)]
    if not kinds:
        return None
    fault = _by_calls(part, name, kinds) or _by_methods(kinds)
    if fault is None:
        return None
    return (
        f"{name} is {type(part).__name__}: {fault}. A checkpoint does not hold that, so that a resumed run would go on "
        "with other numbers. Compute everything from the batch that each call gets."
    )


def _by_calls(part: Any, name: str, kinds: list[type]) -> str | None:
    run = _estimate if name == "advantage" else _loss
    before = _variables(part, kinds)
    try:
        first, second = run(part), run(part)
    except dataclasses.FrozenInstanceError as error:
        return f"it sets an attribute of itself ({error}), and it is frozen"
    except (Exception, SystemExit):  # noqa: BLE001 - it needs columns of the run's own data, for example
        first = second = {}
    after = _variables(part, kinds)
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if changed:
        return f"a call changes {', '.join(changed[:3])}"
    for key, x in first.items():
        if not torch.equal(x.nan_to_num(), second[key].nan_to_num()):
            return f"two calls with one batch give different {key}"
    return None


def _by_methods(kinds: list[type]) -> str | None:
    """State that a trial may not reach, from the code of the methods."""
    for kind in kinds:
        if {"state_dict", "load_state_dict"} & vars(kind).keys():
            return "it has a state_dict, which nothing calls"
        for method in _functions(kind):
            if "__setattr__" in method.__code__.co_names:
                return f"its {method.__name__} sets attributes with __setattr__"
    return None


def _functions(kind: type) -> Iterator[Any]:
    """The functions that a class was written with, not those that pydantic and dataclasses made."""
    for name, value in vars(kind).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isfunction(function) and (name == "__call__" or not name.startswith("__")):
            yield function


def _variables(part: Any, kinds: list[type]) -> dict[str, bytes]:
    """Content of whatever may hold state, by a name for messages."""
    values: dict[str, Any] = {f"self.{key}": value for key, value in vars(part).items()}
    for kind in kinds:
        values |= {f"{kind.__name__}.{key}": value for key, value in vars(kind).items() if not key.startswith("__")}
        functions = list(_functions(kind))
        for function in functions:  # and those of the same file that it calls
            variables = inspect.getclosurevars(function)
            named = {**variables.globals, **variables.nonlocals}
            values |= named
            called = (x for x in named.values() if inspect.isfunction(x) and x.__module__ == kind.__module__)
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
