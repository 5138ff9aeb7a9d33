"""An algorithm: an advantage estimator, a policy loss, a value loss and a KL control, and how they are applied.

Estimators and losses of users must not keep state of their own, which no checkpoint would hold: `state_fault` finds it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt

from verl.algorithms.advantages import AdvantageEstimator
from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.algorithms.importance_sampling import TruncatedIS
from verl.algorithms.kl import KLControl, NoKL
from verl.algorithms.losses import ClippedValueLoss, PolicyLoss, ValueLoss
from verl.component import Description, component
from verl.ops.loss_aggregation import Aggregation
from verl.protocol import DataProto

NORMED = "seq-mean-token-sum-norm"
ROWS, TOKENS = 4, 6  # of the batch that `state_fault` tries; rows of two prompts
_OURS = ("verl.", "pydantic", "builtins")


@component
class Algorithm(Description):
    """The algorithm of a run. The training loop uses its properties (`needs_values`, ...), never its name.

    Args:
        advantage: advantage estimator.
        policy_loss: policy loss per token.
        value_loss: value loss per token; used only if the estimator needs values.
        kl: KL control.
        entropy_coef: coefficient of the entropy bonus, at least 0, in loss per nat.
        final_entropy_coef: its value at the last update, reached linearly; null keeps it constant.
        aggregation: how losses per token become a scalar, see verl.ops.loss_aggregation.
        norm_length: divisor in tokens of seq-mean-token-sum-norm; null with any other aggregation.
        proximal: whose log-probs are `old_log_probs`, which the ratio of the policy loss starts from. `trainer`: those
            of the weights before the update, by a forward pass unless the only update computes them. `behaviour`: those
            that the rollout engine recorded, without a pass, so that the ratio corrects for older weights too.
        correction: importance weights for differences between rollout engine and trainer; null for none.
        selection: dynamic sampling; null to train on all groups.
        epochs: passes over the batch of a step.
        mini_batches: optimizer steps per pass.
        replay_fraction: fraction of a step's rows that come from the replay buffer, in [0, 1), as far as it has enough.
            They are weighted by `correction`, or by `TruncatedIS()` if that is null; see
            `verl.algorithms.importance_sampling`.
        replay_max_staleness: the most policy versions (optimizer steps) that such a row may be behind; null for no
            limit.
    Raises:
        ConfigError: a number outside its range.
    """

    advantage: AdvantageEstimator
    policy_loss: PolicyLoss
    value_loss: ValueLoss = field(default_factory=ClippedValueLoss)
    kl: KLControl = field(default_factory=NoKL)
    entropy_coef: NonNegativeFloat = 0.0
    final_entropy_coef: NonNegativeFloat | None = None
    aggregation: Aggregation = "token-mean"
    norm_length: PositiveInt | None = None
    proximal: Literal["trainer", "behaviour"] = "trainer"
    correction: TruncatedIS | None = None
    selection: DynamicSampling | None = None
    epochs: PositiveInt = 1
    mini_batches: PositiveInt = 1
    replay_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    replay_max_staleness: PositiveInt | None = 16

    @property
    def needs_values(self) -> bool:
        """Whether the run needs a critic."""
        return self.advantage.needs_values

    @property
    def needs_groups(self) -> bool:
        """Whether a prompt needs more than one response."""
        return self.advantage.needs_groups or self.selection is not None

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether each prompt also needs a greedy response with its score."""
        return self.advantage.needs_greedy_baseline

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the trainer computes log-probs before the update.

        With one optimizer step per batch the update itself does.
        """
        if self.proximal == "behaviour":
            return False
        weighs = self.correction is not None or self.replay_fraction > 0
        return self.epochs * self.mini_batches > 1 or weighs or self.kl.needs_old_log_probs

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs a reference."""
        return self.kl.needs_reference

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether some update of the run has an entropy bonus; all of them then have its metric."""
        return self.entropy_coef > 0 or bool(self.final_entropy_coef)

    def entropy_coef_at(self, update: int, total_updates: int) -> float:
        """Loss per nat of entropy at an optimizer step, counted from 0, of so many in the run."""
        if self.final_entropy_coef is None:
            return self.entropy_coef
        share = min(1.0, update / max(1, total_updates - 1))
        return self.entropy_coef + share * (self.final_entropy_coef - self.entropy_coef)

    def faults(self) -> Iterator[str]:
        if self.aggregation != NORMED and self.norm_length is not None:
            yield f"norm_length is {self.norm_length}: only aggregation={NORMED} uses it. Set it to null."
        if self.aggregation == NORMED and self.norm_length is None:
            yield f"norm_length is {self.norm_length}: aggregation={NORMED} needs a number of tokens, at least 1."
        if self.proximal == "behaviour" and self.correction is not None:
            yield (
                "correction is set, and proximal is behaviour: old_log_probs are those of the rollout engine, so "
                "that all of its weights are 1. Set it to null, or proximal=trainer."
            )
        for name in ("advantage", "policy_loss", "value_loss"):
            if (fault := state_fault(getattr(self, name), name)) is not None:
                yield fault


def state_fault(part: Any, name: str) -> str | None:
    """The fault of an estimator or loss that has state; None if none was found.

    It is called twice on one small batch with one seed. It has state if its second result differs, or if a call changes
    its attributes, those of its class, or the variables of its module and closures that its methods name.

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
