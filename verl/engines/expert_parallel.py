"""Expert parallelism: each process holds some experts of every layer and runs the tokens of all processes on them.

router ──> (token, expert) pairs, by expert ── all-to-all ──> own experts, grouped ── all-to-all ──> weighted sum

The exchange of tokens and the sharding are those of transformers (`ep_dispatch_experts`, `grouped_gemm`). Processes
with the same experts shard them further by FSDP; for generation the experts are gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from verl.errors import ConfigError
from verl.models.experts import expert_layers

EXPERT_SHARD, EXPERT = "expert_shard", "expert"  # dimensions of the mesh that experts are laid out over
DISPATCH, DIVIDED = "ep_dispatch_experts", "grouped_gemm"  # transformers' styles
# `model_type` of the families whose gradients were compared with those of one process (tests/equivalence)
PROVEN = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})


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

    base = model.get_base_model() if hasattr(model, "peft_config") else model
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
