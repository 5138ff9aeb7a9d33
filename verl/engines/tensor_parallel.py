"""Tensor parallelism by the plan that transformers has for a model; expert parallelism for mixtures of experts.

x ──> columns of W, split ──> heads, split ──> rows of W, split ──> all-reduce
x ──> router, replicated ──> whole experts, each on one process ──> all-reduce

The factors A and B of a LoRA adapter follow the layer that they adapt:

    columns of W   x ──> A, replicated ──> rows of B, split, as the outputs of W are
    rows of W      x ──> columns of A, split ──> all-reduce ──> B, replicated

A user-defined module splits its layers by itself; `OwnModuleShards` holds its parameters:

between passes  DTensors, which gradient clipping, the optimizer, saving and loading work on
within a pass   the plain tensors that the module was built with, in the same memory; their gradients are copied back

Under expert parallelism each process holds some experts of every layer and runs the tokens of all processes on them:

router ──> (token, expert) pairs, by expert ── all-to-all ──> own experts, grouped ── all-to-all ──> weighted sum

The exchange of tokens and the sharding are those of transformers (`ep_dispatch_experts`, `grouped_gemm`). Processes
with the same experts shard them further by FSDP; for generation the experts are gathered.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl.engines.chunked_logprobs import logits_at_a_time
from verl.errors import ConfigError
from verl.models.model_stats import ModelStats
from verl.models.own_module import OwnModule
from verl.models.structure import expert_layers, unwrapped
from verl.ops.resharding.dtensor import is_divided, local

_log = logging.getLogger(__name__)

COLUMNS = {"colwise", "colwise_gather_output", "colwise_rep"}
ROWS = {"rowwise", "rowwise_rep"}
EXPERT_STYLES = {"grouped_gemm", "moe_tp_experts", "ep_router"}
# Plan styles whose weight slices are known here; others (packed layers) have no simple slices.
DIVIDING = COLUMNS | ROWS | EXPERT_STYLES | {"embedding_rowwise"}
PARTIAL = "replicated_with_grad_allreduce"  # a norm over local heads: replicated weights, partial gradients
SUMS_FORWARD, SUMS_BACKWARD = 2, 5  # of a layer: after attention and MLP; before q, k, v, gate and up
EXPERT_SHARD, EXPERT = "expert_shard", "expert"  # dimensions of the mesh that experts are laid out over
DISPATCH, DIVIDED = "ep_dispatch_experts", "grouped_gemm"  # transformers' styles
# `model_type` of the families whose gradients were compared with those of one process (tests/equivalence)
PROVEN = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})


def exchanged_elements(
    sizes: ModelStats, siblings: int, stages: int, tokens: int, predicted: int | None, *, trains: bool
) -> float:
    """Numbers that a process sends to those that share its layers, in a micro-batch.

    Styles of transformers add up the states after attention and MLP, the gradients before each layer that is divided by
    its outputs, and the states of a divided embedding; the logits of a divided head are gathered, and once more in the
    backward pass where they are made in parts.
    """
    if siblings == 1:
        return 0.0
    of_head = (tokens if predicted is None else predicted) if sizes.has_head else 0
    sums = (SUMS_FORWARD + SUMS_BACKWARD * trains) * -(-sizes.layers // stages) * tokens
    sums += tokens * (sizes.tied and sizes.has_head) + of_head * trains
    in_parts = trains and of_head * sizes.vocabulary > logits_at_a_time("cuda")
    return (siblings - 1) / siblings * (2 * sums * sizes.hidden + of_head * sizes.vocabulary * (1 + in_parts))


def with_experts(model: Any, plan: dict[str, str], size: int) -> dict[str, str]:
    """The plan with whole experts distributed over `size` processes, or replicated where they cannot be."""
    names = {
        general(name): name
        for name, module in model.named_modules()  # with experts in the layout that transformers' kernels expect
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")
    }
    for pattern, name in names.items():
        experts, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
        plan = {at: style for at, style in plan.items() if at != pattern and not at.startswith(f"{pattern}.")}
        router, count = _router_of(parent, experts.num_experts), experts.num_experts
        if router is None or count % size or model.config.get_text_config()._experts_implementation == "eager":
            _log.info("tensor parallelism: the %d experts of %s are replicated", count, pattern)
            continue
        plan |= {f"{pattern}.{weight}": "grouped_gemm" for weight in experts._parameters}
        plan |= {pattern: "moe_tp_experts", f"{pattern.rpartition('.')[0]}.{router}": "ep_router"}
    return plan


def general(name: str) -> str:
    """`layers.3.q_norm` as `layers.*.q_norm`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _router_of(parent: Any, count: int) -> str | None:
    """The name of the router of `count` experts, if it returns (logits, scores, expert indices)."""
    for name, child in parent.named_children():
        if getattr(child, "num_experts", None) == count and hasattr(child, "top_k") and hasattr(child, "weight"):
            weight = child.weight
            with torch.no_grad():
                answer = child(torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device))
            if isinstance(answer, tuple) and len(answer) == 3 and answer[1].shape == answer[2].shape:
                return name
    return None


def shard_over(model: Any, mesh: Any) -> list[str]:
    """Shard a Hugging Face model and its peft adapter over a one-dimensional mesh, in place.

    Every process has loaded the whole model, or has it on the meta device, and keeps its own shard.

    Returns:
        Names of parameters whose gradients must be summed over the mesh after the backward pass.
    Raises:
        ConfigError: transformers has no plan for the model, or the mesh does not divide its sizes.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    base = unwrapped(model)
    refuse_unfit(base, mesh.size())
    plan = plan_of(base, mesh.size())
    partial = {name for name, style in plan.items() if style == PARTIAL}
    adapted = {general(name) for name, _ in _adapted(base)} & set(plan)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    apply_tensor_parallelism(base, mesh, {n: style for n, style in plan.items() if n not in partial | adapted})
    for name, layer in list(base.named_modules()):
        if (pattern := general(name)) in adapted:
            apply_tensor_parallelism(layer, mesh, _plan_of_layer(layer, plan[pattern]))
    if tied and head is not None and head.weight is not embedding.weight:
        head.weight = embedding.weight
    summed = {id(p) for name, p in base.named_parameters() if general(name.rpartition(".")[0]) in partial}
    return [name for name, p in model.named_parameters() if id(p) in summed]


def refuse_unfit(model: Any, size: int) -> None:
    """Refuse a model that cannot be sharded over `size` tensor-parallel processes.

    Raises:
        ConfigError: the reason, and a setting that works.
    """
    name = type(model).__name__
    if not model.tp_plan:
        raise ConfigError(f"model is a {name}: transformers has no tensor-parallel plan for it. Set sharding=fsdp.")
    odd = sorted({style for style in plan_of(model, size).values() if style not in DIVIDING and style != PARTIAL})
    if odd:
        raise ConfigError(
            f"model is a {name}: its tensor-parallel plan has layers of kind {', '.join(odd)}, which this version "
            "cannot shard. Set sharding=fsdp."
        )
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    if (fault := heads_fault(heads, getattr(config, "num_key_value_heads", None) or heads, size)) is not None:
        raise ConfigError(f"sharding.tensor_parallel {fault}")
    width = getattr(config, "intermediate_size", None)
    if width is not None and width % size:
        raise ConfigError(f"sharding.tensor_parallel is {size}: it does not divide intermediate_size {width}.")


def heads_fault(heads: int, kv_heads: int, size: int) -> str | None:
    """Why attention heads cannot be split over `size` processes, as the end of a sentence; None if they can."""
    if heads % size == 0 and kv_heads % size == 0:
        return None
    fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
    return (
        f"is {size}: it must divide the model's {kv_heads} key-value heads and {heads} heads. "
        f"Set it to {' or '.join(map(str, fitting))}."
    )


def plan_of(model: Any, size: int) -> dict[str, str]:
    """The plan of transformers, with whole experts distributed; an embedding or head that is adapted, or whose size
    does not divide, is replicated.
    """
    plan = with_experts(model, dict(model.tp_plan), size)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    ends = {name for name, module in model.named_modules() if module is head or module is embedding} & set(plan)
    tied = head is not None and head.weight is embedding.weight
    uneven = model.config.get_text_config().vocab_size % size != 0
    if ends and (uneven or (tied and len(ends) == 1) or ends & {name for name, _ in _adapted(model)}):
        _log.info("tensor parallelism: %s are replicated", ", ".join(sorted(ends)))
        plan = {name: style for name, style in plan.items() if name not in ends}
    return plan


def _adapted(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter, by name."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def _plan_of_layer(layer: Any, style: str) -> dict[str, str]:
    """The plan of one layer: for its weights and their adapter, or for its own tensors if it has no adapter."""
    if not hasattr(layer, "lora_A"):  # a layer beside adapted ones
        return {"": style, **dict.fromkeys(layer._parameters, style)}
    factor = "lora_B" if style in COLUMNS else "lora_A"
    return {"base_layer": style, **{f"{factor}.{name}": style for name in getattr(layer, factor)}}


class OwnModuleShards:
    """The local shards of a user-defined module.

    Args:
        model: its parameters are replaced by DTensors, in place.
        mesh: of one dimension, the tensor-parallel processes.
    Attributes:
        summed: parameters whose gradients must be summed over the mesh.
    """

    def __init__(self, model: OwnModule, mesh: Any):
        from torch.distributed.tensor import DTensor, Shard

        if model.tp_rank.size != mesh.size():
            raise ConfigError(
                f"model is a {type(model.module).__name__}: it was built for {model.tp_rank.size} tensor-parallel "
                f"processes, but there are {mesh.size()}."
            )
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self.summed: list[nn.Parameter] = []
        names = {id(p): name for name, p in model.named_parameters()}
        parameters: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for key, p in module._parameters.items():
                if p is None:
                    continue
                part = model.part_of(names[id(p)])
                if part.sums_gradient:
                    self.summed += [p] if all(p is not other for other in self.summed) else []
                if part.dim is None:
                    continue
                if id(p) not in parameters:
                    laid_out = DTensor.from_local(p.detach(), mesh, [Shard(part.dim)], run_check=False)
                    parameters[id(p)] = nn.Parameter(laid_out, requires_grad=p.requires_grad)
                whole = parameters[id(p)]
                self._owners.setdefault(id(whole), []).append((module, key))
                self._parameters[id(whole)] = whole
        for number, owners in self._owners.items():
            for module, key in owners:
                module._parameters[key] = self._parameters[number]

    @contextlib.contextmanager
    def running(self, trains: bool = False) -> Iterator[None]:
        """Inside this context the module has its plain tensors; `trains` copies their gradients back."""
        plain = {
            number: nn.Parameter(local(p), requires_grad=p.requires_grad and trains)
            for number, p in self._parameters.items()
        }
        try:
            for number, owners in self._owners.items():
                for module, key in owners:
                    module._parameters[key] = plain[number]
            yield
            for number, p in self._parameters.items():
                if (grad := plain[number].grad) is not None:
                    add_gradient(p, grad)
        finally:
            for number, owners in self._owners.items():
                for module, key in owners:
                    module._parameters[key] = self._parameters[number]


@torch.no_grad()
def add_gradient(parameter: nn.Parameter, part: Tensor) -> None:
    """Add this process's part of a gradient, which may be padded, to that of a divided parameter."""
    assert is_divided(parameter)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    shard = local(parameter.grad)
    shard += part.reshape(-1)[: shard.numel()].view_as(shard)


def experts_fault(model_type: str, experts: int | None, size: int) -> str | None:
    """Why experts cannot be sharded over `size` processes, as the end of a sentence; None if they can."""
    if experts is None:
        return f"is {size}: a {model_type} has no experts."
    if model_type not in PROVEN:
        return f"is {size}: expert parallelism is not tested with {model_type}, only with {', '.join(sorted(PROVEN))}."
    if experts % size:
        return f"is {size}: it does not divide the {experts} experts of a layer."
    return None


def divide_experts(model: Any, mesh: Any) -> list[nn.Module]:
    """Shard the experts of a model over a one-dimensional mesh, in place, and exchange tokens in its forward pass.

    Every process has loaded the whole model, or has it on the meta device.

    Returns:
        The modules that hold experts.
    Raises:
        ConfigError: expert parallelism is not tested with this family of models.
    """
    from transformers.distributed.tensor_parallel import apply_expert_parallelism

    base = unwrapped(model)
    config, layers = base.config.get_text_config(), expert_layers(base)
    counts = {module.num_experts for module in layers.values()}
    fault = experts_fault(config.model_type, max(counts, default=None), mesh.size())
    plan = {name: style for name, style in (base.ep_plan or {}).items() if style in (DISPATCH, DIVIDED)}
    if fault is None and DISPATCH not in plan.values():
        fault = f"is {mesh.size()}: transformers has no plan for the experts of a {type(base).__name__}."
    if fault is not None:
        raise ConfigError(f"sharding.ep {fault} Set sharding.ep=1.")
    if any("base_layer" in name for name in layers):
        raise ConfigError(
            f"lora.target_modules includes experts, and sharding.ep is {mesh.size()}: adapters of experts cannot be "
            "sharded. Name layers of attention, such as [q_proj,k_proj,v_proj,o_proj], or set "
            "sharding.ep=1."
        )
    apply_expert_parallelism(base, mesh, None, plan)  # type: ignore[arg-type]
    return list(layers.values())


@contextlib.contextmanager
def experts_gathered(modules: list[nn.Module]) -> Iterator[None]:
    """Inside this context the process has all experts and exchanges no tokens. All processes enter and leave together.

    Parameters sharded by FSDP must be gathered before.
    """
    before: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
    try:
        for module in modules:
            parts: dict[str, Any] = dict(module._parameters)
            before.append((module, parts, dict(vars(module))))
            with torch.no_grad():
                for name, part in parts.items():
                    whole = nn.Parameter(part.detach().full_tensor(), requires_grad=False)
                    module._parameters[name] = whole
                    module.num_experts = len(whole)  # type: ignore[assignment]
            del module.forward  # leaves the forward of the class, which exchanges no tokens
            module._is_expert_parallel = False  # type: ignore[assignment]
        yield
    finally:
        for module, parts, attributes in before:
            module._parameters.update(parts)
            module.num_experts, module._is_expert_parallel = (
                attributes[n] for n in ("num_experts", "_is_expert_parallel")
            )
            module.forward = attributes["forward"]
