"""A rollout engine with weights of its own, and a fault that real engines have had: each draws from another policy."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch

from verl.component import component
from verl.rollout.base import SyncResult, TurnEngine, TurnLimits, TurnRequest
from verl.rollout.hf import HFEngine, HFRollout

Fault = Literal["none", "stale", "temperature", "padding", "positions", "narrow", "other model", "long rows"]


@component
class FaultyRollout(HFRollout):
    """Samples from a copy of the model that follows without being proven.

    Args:
        fault: `stale`: no sync after the first is carried out; `temperature`: it draws by twice the temperature;
            `padding`: attention sees padding; `positions`: those of the response count from 0 again; `narrow`: it
            computes in bfloat16 and does not say so; `other model`: one weight is another's; `long rows`: from the
            third step on, responses are longer, and their positions count from 0 again.
        says: the type that it claims to compute in.
    """

    location: ClassVar[Literal["trainer", "process", "server"]] = "process"

    fault: Fault = "none"
    says: str | None = None

    def attach(self, model: Any, tokenizer: Any, seed: int, autocast: Any = None, context: Any = None) -> FaultySampler:
        return FaultySampler(self, model, tokenizer, seed, autocast)


class FaultySampler(HFEngine):
    """The running engine of `FaultyRollout`."""

    def __init__(self, options: FaultyRollout, model: Any, tokenizer: Any, seed: int, autocast: Any = None):
        fault = options.fault
        temperature = options.temperature * (2 if fault == "temperature" else 1)
        narrow = "bfloat16" if fault == "narrow" else autocast
        super().__init__(replace(options, temperature=temperature), copy.deepcopy(model), tokenizer, seed, narrow)
        self.longest_compared = 10**6  # an engine elsewhere compares nothing by itself
        self.trained, self.fault, self.syncs, self.compute_type = model, fault, 0, options.says

    def sync(self) -> SyncResult:
        self.syncs += 1
        if self.fault == "stale" and self.syncs > 1:
            return SyncResult("nothing was copied, and nothing is said of it")
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), self.trained.parameters(), strict=True):
                mine.copy_(theirs)
            if self.fault == "other model":
                self.model.model.layers[1].mlp.down_proj.weight.mul_(-1)
        return SyncResult("copied")

    def turns(self, limits: TurnLimits) -> TurnEngine:
        turns = super().turns(limits)
        if self.fault == "long rows":
            add = turns.add

            def add_of_step(turn: TurnRequest) -> None:
                self.options = replace(self.options, max_new_tokens=3 if turn.step < 3 else 7)
                add(replace(turn, max_new_tokens=self.options.max_new_tokens))

            turns.add = add_of_step
        return turns

    @property
    def decoded_model(self) -> Any:
        is_long = self.fault == "long rows" and self.options.max_new_tokens > 3
        return _Disturbed(self.model, "positions" if is_long else self.fault)


class _Disturbed:
    """A model that is asked with another mask or other positions than its caller gave."""

    def __init__(self, model: Any, fault: Fault):
        self._orig_mod, self.fault = model, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._orig_mod, name)

    def __call__(self, input_ids: Any, **inputs: Any) -> Any:
        if self.fault == "padding" and "attention_mask" in inputs:
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        if self.fault == "positions" and input_ids.shape[1] == 1:
            inputs["position_ids"] = inputs["position_ids"] - inputs["position_ids"].min()
        return self._orig_mod(input_ids=input_ids, **inputs)
