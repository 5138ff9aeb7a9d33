"""Experts chosen by the routers of a model: counted, recorded during sampling, and replayed in training.

forward pass ──> router of a layer ──> (logits, weights, experts) ──> this module ──> experts of the layer
                                                                       │ counts, entropy    `ExpertLoad`
                                                                       │ recorded           [tokens layers k]
                                                                       └ replaced by the recorded ones (router replay)

A token with replaced experts gets the weights that the router gives to these experts with its current logits. How a
router computes weights from logits is found by trying the known rules on a router of the same kind.

Source of router replay: Ma et al. 2025, arXiv:2510.11370.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl.errors import ConfigError
from verl.model_paths.micro_batch import MicroBatch
from verl.models.structure import routers, unwrapped

SOFTMAX = functools.partial(torch.softmax, dim=-1)
UNKNOWN = -1  # in place of an expert: the router chooses
TRIED_TOKENS, TOLERANCE = 64, 1e-6


@dataclass(frozen=True)
class RouterWeights:
    """Rule by which a router computes the weights of the chosen experts from its logits.

    Attributes:
        score: function of all logits.
        normalised: whether weights of a token are divided by their sum.
        scale: factor of the weights.
    """

    score: Callable[[Tensor], Tensor]
    normalised: bool
    scale: float

    def of(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Weights [n k] of experts [n k]."""
        weights = self.score(logits.float()).gather(-1, experts)  # in float32, as models do
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.scale


class ExpertLoad:
    """Frequency of each expert, and entropy of the routers, over the tokens that predicted a response token.

    Args:
        layers, experts: numbers of both in the model.
    """

    def __init__(self, layers: int, experts: int, device: torch.device):
        self.chosen = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        self.entropy, self.tokens = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))

    def tensors(self) -> Tensor:
        """All counts as one vector, which may be summed over processes."""
        return torch.cat([self.chosen.flatten(), torch.stack([self.entropy, self.tokens])])

    @staticmethod
    def metrics(summed: Tensor, layers: int) -> dict[str, float]:
        """Metrics of summed `tensors`: ratio of the busiest expert's load to the mean, and share of experts without a
        token, both averaged over layers; entropy of routers, averaged over tokens and layers."""
        chosen, (entropy, tokens) = summed[:-2].view(layers, -1), summed[-2:].tolist()
        if not tokens:
            return {}
        busiest = chosen.amax(dim=1) / chosen.mean(dim=1)
        return {
            "expert_load_max_ratio": float(busiest.mean()),
            "expert_idle_share": float((chosen == 0).double().mean()),
            "router_entropy_nats": entropy / tokens,
        }


class ExpertRouting:
    """The routers of a model, in the order of its layers.

    Attributes:
        layers, experts, top_k: numbers of layers with routers, of experts, and of experts per token.
    """

    def __init__(self, model: nn.Module):
        self._found = routers(model)
        self.layers = len(self._found)
        self.experts, self.top_k = self._found[0].num_experts, self._found[0].top_k
        self._weights: RouterWeights | None = None
        self.forced: Tensor | None = None
        self._predicted: Tensor | None = None
        self._records: list[Tensor | None] | None = None
        self._load: ExpertLoad | None = None
        self._counted: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._shares: Tensor | None = None
        self._balance: list[Tensor] = []
        for layer, router in enumerate(self._found):
            router.register_forward_hook(lambda module, _, output, layer=layer: self._routed(layer, output))

    def prove_replay(self, name: str) -> None:
        """Find the rule by which the routers weigh experts.

        Raises:
            ConfigError: the rule is unknown, or not the same for all routers.
        """
        ways = [weights_of_router(router) for router in self._found]
        self._weights = ways[0] if all(way == ways[0] for way in ways) else None
        if self._weights is None:
            raise ConfigError(
                f"{name}: how {type(self._found[0]).__name__} weighs the experts of a token is not known, so that its "
                "choices cannot be replayed. Set rollout.router_replay=false."
            )

    def balance(self, load: Tensor | None) -> None:
        """Compute the load balancing loss of each following micro-batch, from the load of the whole batch.

        Args:
            load: `ExpertLoad.tensors` of the batch, summed over all processes; None stops it.
        """
        self._shares = None
        if load is not None:
            rows = load[-1].clamp_min(1.0)  # tokens of all layers
            self._shares = load[:-2].view(self.layers, -1).sum(dim=0) * self.experts / rows**2

    def balance_loss(self) -> Tensor:
        """The current micro-batch's share of E sum_e f_e P_e, where f_e is the share of tokens of all layers for which
        expert e was chosen, and P_e its mean probability.

        Source: Fedus et al. 2021, arXiv:2101.03961, eq. 4-6, over all layers, as transformers computes it.
        """
        return torch.stack(self._balance).sum()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which `last_chosen` returns the experts of the last forward pass."""
        records: list[Tensor | None] = [None] * self.layers
        self._records = records
        try:
            yield
        finally:
            self._records = None

    def last_chosen(self, rows: int) -> Tensor:
        """Experts of the last token of each row of the last forward pass, [rows layers k] int16."""
        assert self._records is not None
        experts = [record.view(rows, -1, self.top_k)[:, -1] for record in self._records if record is not None]
        return torch.stack(experts, dim=1).to(torch.int16)

    def begin(self, micro: MicroBatch, *, replays: bool = False, counts: bool = False) -> None:
        """Prepare for the forward pass of a micro-batch, which the backward pass may partly repeat.

        Args:
            replays: use the experts recorded during sampling, where known.
            counts: count experts, for `end`.
        """
        self._add()
        self._balance, self._predicted, self.forced = [], None, None
        is_known = replays and "routed_experts" in micro.tensors
        if not (counts or is_known):
            return
        entries, predicted = micro.model_tokens()
        self._predicted = predicted if counts else None
        self.forced = _by_token(micro, entries) if is_known else None

    def end(self, device: torch.device) -> ExpertLoad:
        """Return the counts since the last call, and end replay."""
        self._add()
        load, self._load, self.forced, self._predicted, self._balance = self._load, None, None, None, []
        return ExpertLoad(self.layers, self.experts, device) if load is None else load

    def _add(self) -> None:
        """Add the counts of the previous micro-batch, after its backward pass, which may repeat the forward pass."""
        for layer, (chosen, entropy, tokens) in self._counted.items():
            if self._load is None:
                self._load = ExpertLoad(self.layers, self.experts, chosen.device)
            self._load.chosen[layer] += chosen
            self._load.entropy += entropy
            self._load.tokens += tokens
        self._counted.clear()

    def _routed(self, layer: int, output: Any) -> Any:
        logits, weights, experts, *others = output
        if self.forced is not None:
            forced = self.forced[:, layer].to(experts.dtype)
            known = forced[:, :1] != UNKNOWN
            forced = torch.where(known, forced, experts)
            assert self._weights is not None
            weights = torch.where(known, self._weights.of(logits, forced).to(weights.dtype), weights)
            experts = forced
        if self._records is not None:
            self._records[layer] = experts
        if self._predicted is not None:
            with torch.no_grad():
                self._counted[layer] = _count(logits, experts, self._predicted, self.experts)
            if self._shares is not None and torch.is_grad_enabled():
                probabilities = logits.softmax(dim=-1).double() * self._predicted[:, None]
                self._balance.append((probabilities.sum(dim=0) * self._shares).sum())
        return logits, weights, experts, *others


def _count(logits: Tensor, experts: Tensor, predicted: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    weight = predicted.double()
    chosen = torch.zeros(count, dtype=torch.float64, device=logits.device)
    chosen.scatter_add_(0, experts.reshape(-1), weight.repeat_interleave(experts.shape[1]))
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    entropies = -(log_probs.exp() * log_probs).sum(dim=-1).double()
    return chosen, (entropies * weight).sum(), weight.sum()


def _by_token(micro: MicroBatch, entries: Tensor) -> Tensor:
    """Recorded experts of the tokens that the model runs on, [n layers k]; UNKNOWN if they predict no sampled token."""
    routed = micro.tensors["routed_experts"]
    rows, width, *shape = routed.shape
    prompt = micro.tensors["input_ids"].shape[1] - width
    whole = routed.new_full((rows, prompt + width, *shape), UNKNOWN)
    whole[:, prompt - 1 : prompt - 1 + width] = routed
    return whole.flatten(0, 1)[entries]


def defines_balance_loss(model: Any) -> bool:
    """Whether transformers defines a load balancing loss for the routers of a model."""
    kinds = type(unwrapped(model)).__mro__  # FSDP inserts a subclass
    return any(hasattr(sys.modules.get(kind.__module__), "load_balancing_loss_func") for kind in kinds)


def routing_of(model: Any) -> ExpertRouting | None:
    """The routers of a model, with hooks from the first call on; None for a model without routers of a known form."""
    base = unwrapped(model)
    if "_verl_routing" not in vars(base):
        modules = routers(base)
        is_known = bool(modules) and all(_tried(router) is not None for router in modules)
        is_even = len({(router.num_experts, router.top_k) for router in modules}) == 1
        vars(base)["_verl_routing"] = ExpertRouting(base) if is_known and is_even else None
    return vars(base)["_verl_routing"]


def weights_of_router(router: Any) -> RouterWeights | None:
    """Rule by which a router computes weights from logits; None if unknown."""
    if (answer := _tried(router)) is None:
        return None
    logits, weights, experts = answer
    scales = {1.0, float(getattr(router, "routed_scaling_factor", 1.0))}
    for score in (SOFTMAX, torch.sigmoid):
        for normalised in (False, True):
            for scale in scales:
                way = RouterWeights(score, normalised, scale)
                if torch.allclose(way.of(logits, experts), weights, atol=TOLERANCE, rtol=TOLERANCE):
                    return way
    return None


@torch.no_grad()
def _tried(router: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Logits, weights and experts of random tokens by a router of this kind; None for other outputs."""
    try:
        twin = _router_like(router)
        states = torch.randn(TRIED_TOKENS, twin.weight.shape[-1], generator=torch.Generator().manual_seed(0))
        logits, weights, experts, *_ = twin(states.to(twin.weight.dtype))
        is_known = logits.shape == (TRIED_TOKENS, twin.num_experts) and not experts.is_floating_point()
        is_known = is_known and weights.shape == experts.shape == (TRIED_TOKENS, twin.top_k)
    except Exception:  # noqa: BLE001 - whatever a model's own code asks for
        return None
    return (logits, weights, experts) if is_known else None


def _router_like(router: Any) -> Any:
    """A router of the same kind with random weights."""
    twin = copy.copy(router)
    twin._parameters = {
        name: nn.Parameter(torch.randn(tuple(p.shape), generator=torch.Generator().manual_seed(1)), requires_grad=False)
        for name, p in router._parameters.items()
    }
    twin._buffers = {name: torch.rand(tuple(x.shape)) for name, x in router._buffers.items() if x is not None}
    twin._forward_hooks = type(router._forward_hooks)()
    return twin.float()
