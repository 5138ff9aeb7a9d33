"""Linear layers divided over processes that work on the same rows, by the plan that transformers has for a model.

x ──> columns of W, one part each ──> heads, one part each ──> rows of W, one part each ──> add up ──> x
"""

from __future__ import annotations

import logging
from typing import Any

from verl.errors import ConfigError

# What each style of a plan does to weights is known here; others (packed and expert layers) have no simple slices.
DIVIDING = {"colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_rep", "embedding_rowwise"}
PARTIAL = "replicated_with_grad_allreduce"  # a norm over this process's heads: whole weights, a part of the gradient

_log = logging.getLogger(__name__)


def split_over(model: Any, mesh: Any) -> list[str]:
    """Divide a Hugging Face model over the processes of a one-dimensional mesh, in place.

    Every process has loaded it whole, or on the meta device, and keeps its own part.

    Returns:
        Names of parameters whose gradients have to be added up over the mesh after the backward pass.
    Raises:
        ConfigError: there is no plan for the model, or its sizes do not divide.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    refuse_unfit(model, mesh.size())
    plan = plan_of(model, mesh.size())
    partial = {name for name, style in plan.items() if style == PARTIAL}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name not in partial})
    if tied:
        head.weight = embedding.weight
    return [name for name, _ in model.named_parameters() if _general(name.rpartition(".")[0]) in partial]


def refuse_unfit(model: Any, size: int) -> None:
    """Refuse a model that cannot be divided over so many processes.

    Raises:
        ConfigError: with what would fit.
    """
    name = type(model).__name__
    if hasattr(model, "peft_config"):
        raise ConfigError("lora is set: tensor parallelism does not divide adapters. Set sharding=fsdp, or lora=null.")
    if not model.tp_plan:
        raise ConfigError(f"model is a {name}: transformers has no tensor-parallel plan for it. Set sharding=fsdp.")
    odd = sorted({style for style in model.tp_plan.values() if style not in DIVIDING and style != PARTIAL})
    if odd:
        raise ConfigError(
            f"model is a {name}: its tensor-parallel plan has layers of kind {', '.join(odd)}, which this version does "
            "not divide. Set sharding=fsdp."
        )
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    if (fault := heads_fault(heads, getattr(config, "num_key_value_heads", None) or heads, size)) is not None:
        raise ConfigError(f"sharding.tensor_parallel {fault}")
    width = getattr(config, "intermediate_size", None)
    if width is not None and width % size:
        raise ConfigError(f"sharding.tensor_parallel is {size}: it does not divide intermediate_size {width}.")


def heads_fault(heads: int, kv_heads: int, size: int) -> str | None:
    """Why attention heads cannot be divided over `size` processes, as the rest of a sentence; None if they can."""
    if heads % size == 0 and kv_heads % size == 0:
        return None
    fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
    return (
        f"is {size}: it must divide the model's {kv_heads} key-value heads and {heads} heads. "
        f"Set it to {' or '.join(map(str, fitting))}."
    )


def plan_of(model: Any, size: int) -> dict[str, str]:
    """The plan of transformers, with embedding and output head left whole where they cannot be divided."""
    plan = dict(model.tp_plan)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    ends = {name for name, module in model.named_modules() if module is head or module is embedding} & set(plan)
    tied = head is not None and head.weight is embedding.weight
    if ends and (model.config.get_text_config().vocab_size % size or (tied and len(ends) == 1)):
        _log.info("tensor parallelism: %s stay whole", ", ".join(sorted(ends)))
        plan = {name: style for name, style in plan.items() if name not in ends}
    return plan


def _general(name: str) -> str:
    """`layers.3.q_norm` as `layers.*.q_norm`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
