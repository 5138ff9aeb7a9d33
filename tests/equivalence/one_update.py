"""One update of an engine on rows that are made here: its loss, its gradients, and what it scores."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from verl.component import BuildContext
from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.engine import TrainingEngine
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.engines.sharding import NoSharding, Sharding
from verl.model_paths.check import paths_for
from verl.models.heads import LMHead
from verl.models.parallel_info import full_tensor
from verl.models.pretrained import ModelSource
from verl.ops.batching import BatchPartition
from verl.ops.masking import aggregate
from verl.protocol import DataProto
from verl.workers.base import load_unsharded


def rows_with_holes(prompts: list[int], group: int, responses: list[int], vocabulary: int = 40) -> DataProto:
    """Rows of `group` responses to each prompt, of these lengths; some tokens in the midst of a response are masked."""
    draw = torch.Generator().manual_seed(0)
    count, p, t = len(prompts) * group, max(prompts), max(responses)
    ids = torch.randint(4, vocabulary, (count, p + t), generator=draw)
    attention = torch.zeros(count, p + t, dtype=torch.int64)
    for row in range(count):
        prompt, response = prompts[row // group], responses[row % len(responses)]
        ids[row, :p] = ids[row // group * group, :p]
        attention[row, p - prompt : p + response] = 1
    ids *= attention
    mask = attention[:, p:].bool()
    mask[:, 2::5] = False  # what a tool has answered
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0) * attention,
            "responses": ids[:, p:],
            "response_mask": mask,
            "advantages": torch.randn(count, t, generator=draw, dtype=torch.float64) * mask,
        }
    )


METRICS = ("loss", "grad_norm", "router_aux_loss")


class Float64Alone(TorchFunctionMode):
    """Within, norms and routers that models compute in float32 are computed in float64, so that no gap is theirs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args = tuple(wide.get(x, x) if isinstance(x, torch.dtype) else x for x in args)
        return func(
            *args, **{k: wide.get(x, x) if isinstance(x, torch.dtype) else x for k, x in (kwargs or {}).items()}
        )


def one_update(source: ModelSource, parallel: Parallelism, rows: DataProto, **options: Any) -> dict[str, Tensor]:
    """See `_one_update`; with `exact`, nothing is rounded to float32."""
    with Float64Alone() if options.pop("exact", False) else contextlib.nullcontext():
        return _one_update(source, parallel, rows, **options)


def _one_update(
    source: ModelSource, parallel: Parallelism, rows: DataProto, share: int = 0, shares: int = 1, **options: Any
) -> dict[str, Tensor]:
    """The loss, the scores of the own rows by row number, and the whole gradient of every parameter.

    Args:
        share, shares: which rows are this process's.
        options: `lora`, `checkpointing`, `tokens` of a micro-batch, `router_aux_loss_coef`.
    """
    model = load_unsharded(source, "causal_lm", "cpu", parallel, sliced=False)
    if (lora := options.get("lora")) is not None:
        torch.manual_seed(0)
        model = lora.apply(model, causal_lm=True)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    paths_for(model, 64, shares_tokens=parallel.shares_tokens)
    parallel.shard_model(model)
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = TrainingEngine(
        model, parallel, options.get("tokens", 100), AdamW(lr=1e-3, max_grad_norm=None), total_updates=1
    )
    head, own = LMHead(model), BatchPartition(rows, shares).rows[share]
    engine.balance_routers(options.get("router_aux_loss_coef", 0.0), head)

    def loss(model, micro, totals):
        scores = token_log_probs(model, head, micro, 0.9, entropy="grad", num_chunks=3)
        per_token = -scores.log_probs * micro.tensors["advantages"] - 0.01 * scores.entropies
        return aggregate(per_token, micro.tensors["response_mask"], "token-mean", totals), {}

    def score(model, micro):
        found = token_log_probs(model, head, micro, 0.9, entropy="value", rank=True)
        return {"log_probs": found.log_probs, "entropies": found.entropies, "best": found.is_likeliest.double()}

    found = {f"row {row} {k}": x[i] for k, x in engine.infer(rows[own], score).items() for i, row in enumerate(own)}
    metrics = engine.update(rows[own], loss)
    found |= {name: torch.tensor(metrics[name], dtype=torch.float64) for name in METRICS if name in metrics}
    for name, parameter in engine.parameters.items():
        if parameter.requires_grad:
            found[f"gradient of {name}"] = full_tensor(parameter.grad).detach().clone()
    return found


def same_update(
    bench: Any, model: ModelSource, rows: DataProto, sharding: Sharding, tolerance: float = 1e-9, **options: Any
) -> None:
    """Assert that every process scores what one process does, and that all come to its loss and gradients."""
    wanted = one_update(model, NoSharding().build(BuildContext()), rows, **options)
    seen = set()
    for found in bench.updated(model, sharding, rows, options).result(timeout=600):
        gaps = {name: float((x - wanted[name]).abs().max()) for name, x in found.items()}
        assert {name: gap for name, gap in gaps.items() if not gap <= tolerance} == {}
        seen |= found.keys()
    assert seen == wanted.keys()
