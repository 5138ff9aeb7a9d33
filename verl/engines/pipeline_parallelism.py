"""Pipeline parallelism: each process holds some layers of a model, and micro-batches pass through the stages.

stage 0      embedding, layers ──states──> stage 1      layers ──states──> last stage      layers, norm, head, loss
             <──gradients──                             <──gradients──

A stage runs the unchanged function of the role (loss, log-probs) on the unchanged model class: layers of other stages
are identities, the embedding of a later stage returns the hidden states that it received, and the final norm of an
earlier stage ends the forward pass. The schedules are those of `torch.distributed.pipelining`. Their receive buffers
have one shape for all micro-batches of a step, so hidden states are sent as one line of tokens, padded to the longest.

What the stages exchange apart from hidden states:

tied embedding   on the first and the last stage: gradients are summed over both, and counted once in the norm
value head       on all stages, with a gradient on the last only: likewise
experts          with ep those of a stage's layers are divided over its processes, which exchange tokens
metrics          losses and metrics of the last stage are broadcast to the others
weights          with dp_shard or cp sharded over the processes of a stage, gathered while it runs (`StageShards`):

at rest      a shard of every weight, its gradient and its optimizer state
for a step   gather all weights of the stage ──> every micro-batch, forward and backward ──> reduce-scatter gradients

A stage runs many small micro-batches, so weights are gathered once for all of them, and gradients are accumulated
locally and reduced once. During a step a process therefore holds all weights and gradients of its stage. (`fully_shard`
of torch gathers for every micro-batch, and its hooks expect a forward pass that runs to its end.)

Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO), with the sharing of the first stage at rest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.component import BuildContext
from verl.engines.fsdp import parameter_owners, read_slices
from verl.engines.parallel_degrees import ParallelDegrees, stage_bounds
from verl.engines.parallel_dims import REPLICATE, SHARD, STAGE, TENSOR, ShardedParallelism, buckets
from verl.engines.tensor_parallel import (
    EXPERT,
    EXPERT_SHARD,
    add_gradient,
    divide_experts,
    experts_gathered,
    shard_over,
)
from verl.errors import ConfigError
from verl.model_paths.check import TAIL, record_of
from verl.model_paths.context_attention import ContextStyle
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import head_of
from verl.models.parallel_info import Autocast
from verl.models.structure import unwrapped
from verl.ops.resharding.dtensor import at_stage, at_stage_of, is_divided, is_on_other_stage, local, mesh_dims
from verl.ops.resharding.execute import reshard
from verl.ops.resharding.layout import Layout, Mesh, TensorLayout
from verl.ops.resharding.plan import Plan, reshard_plan
from verl.utils.progress import report

Schedule = Literal["gpipe", "1f1b"]
Forward = Callable[[MicroBatch], Tensor | None]


@dataclass(frozen=True)
class DecoderStack:
    """The parts of a decoder that is split into pipeline stages.

    Attributes:
        module: the module that has them as attributes.
        embedding: token ids to hidden states [b s D].
        layers: each maps hidden states to hidden states.
        norm: the final norm, after the last layer.
    """

    module: Any
    embedding: Any
    layers: list[Any]
    norm: Any


def decoder_stack(model: Any) -> DecoderStack:
    """The decoder stack of a Hugging Face model, with or without a peft adapter.

    Raises:
        ConfigError: the model has no embed_tokens, layers and norm.
    """
    base = unwrapped(model)
    for module in base.modules():
        layers, embedding = (getattr(module, name, None) for name in ("layers", "embed_tokens"))
        norm = getattr(module, "norm", None)
        if isinstance(layers, nn.ModuleList) and isinstance(embedding, nn.Embedding) and isinstance(norm, nn.Module):
            return DecoderStack(module, embedding, list(layers), norm)
    raise ConfigError(
        f"model is a {type(base).__name__}: pipeline stages need a model with embed_tokens, layers and norm, such "
        "as Llama, Qwen2 or Qwen3. Set sharding.pp=1, and shard it with sharding.tp or sharding.dp_shard."
    )


def layer_costs(stack: DecoderStack, head: Any) -> tuple[list[float], float]:
    """Multiplications per token of each layer, and of the output head; the embedding has none."""
    costs = [float(sum(p.numel() for p in layer.parameters())) for layer in stack.layers]
    weight = getattr(head, "weight", None)
    return costs, 0.0 if weight is None else float(weight.numel())


class _StageEnd(BaseException):
    """Raised where the forward pass reaches the end of a stage, to leave the model."""

    def __init__(self, states: Tensor):
        self.states = states


@dataclass
class StageCut:
    """Division of a model into stages, and the stage of this process.

    Args:
        stack: the decoder stack of the model.
        bounds: index of the first layer of each stage, then the number of layers.
        stage: index of the stage of this process.
    """

    stack: DecoderStack
    bounds: list[int]
    stage: int
    _received: Tensor | None = field(default=None, repr=False)

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def stages_of(self, model: nn.Module) -> dict[int, tuple[int, ...]]:
        """Stages that hold each parameter, by `id` of the parameter: two for a tied embedding, all for a parameter
        outside the stack (a value head).
        """
        everywhere = tuple(range(self.num_stages))
        stages: dict[int, set[int]] = {}
        head = output_head(model)
        owners: list[tuple[Any, int]] = [(self.stack.embedding, 0), (self.stack.norm, self.num_stages - 1)]
        owners += [(head, self.num_stages - 1)] if head is not None else []
        for stage in range(self.num_stages):
            owners += [(layer, stage) for layer in self.stack.layers[self.bounds[stage] : self.bounds[stage + 1]]]
        for module, stage in owners:
            for parameter in module.parameters():
                stages.setdefault(id(parameter), set()).add(stage)
        return {id(p): tuple(sorted(stages.get(id(p), everywhere))) for p in model.parameters()}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside this context a forward pass of the model runs only this stage."""
        first, last = self.bounds[self.stage], self.bounds[self.stage + 1]
        replaced = [layer for number, layer in enumerate(self.stack.layers) if not first <= number < last]
        before = [vars(layer).get("forward") for layer in replaced]
        parts = self.stack.module._modules
        try:
            for layer in replaced:
                layer.forward = lambda hidden_states, *_, **__: hidden_states
            if self.stage:
                parts["embed_tokens"] = _Received(self)
            if not self.is_last:
                parts["norm"] = _StageEndModule()
            yield
        finally:
            parts |= {"embed_tokens": self.stack.embedding, "norm": self.stack.norm}
            for layer, forward in zip(replaced, before, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward

    def run(self, forward: Callable[[], Tensor | None], received: Tensor | None) -> Tensor | None:
        """Run this stage once.

        Args:
            forward: calls the model once.
            received: hidden states [tokens D] from the previous stage; None on the first.
        Returns:
            Hidden states for the next stage; on the last stage the result of `forward`.
        """
        self._received = received
        try:
            output = forward()
        except _StageEnd as end:
            return end.states
        finally:
            self._received = None
        assert self.is_last, "the forward pass did not reach the final norm of the model"
        return output

    def take_received(self) -> Tensor:
        """The hidden states from the previous stage; they can be taken once."""
        states, self._received = self._received, None
        assert states is not None, "with pipeline stages the model is called once per micro-batch"
        return states


class _Received(nn.Module):
    """Replaces the embedding on stages after the first: returns the received hidden states."""

    def __init__(self, cut: StageCut):
        super().__init__()
        self.cut = cut

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        states = self.cut.take_received()
        return states[: ids.numel()].view(*ids.shape, states.shape[-1])


class _StageEndModule(nn.Module):
    """Replaces the final norm on stages before the last: ends the forward pass."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        raise _StageEnd(hidden_states)


def output_head(model: Any) -> Any:
    """The language-model head of a model, or None."""
    base = unwrapped(head_of(model).backbone)
    return base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None


def num_tokens(micro: MicroBatch) -> int:
    """Tokens that the model runs on in this micro-batch: those of the packed line, or of the padded rows."""
    return micro.tensors["input_ids"].numel() if micro.packing is None else len(micro.packing.tokens)


class PipelineRunner:
    """Runs the micro-batches of a step through the stages.

    Args:
        cut: the split of the model.
        group: process group of the stages, in order.
        device: the device of this stage.
        schedule: order of forward and backward passes.
    """

    def __init__(self, cut: StageCut, group: Any, device: torch.device, schedule: Schedule):
        self.cut, self.group, self.device, self.schedule = cut, group, device, schedule

    def run(self, micros: Sequence[MicroBatch], forward: Forward, dtype: torch.dtype, *, trains: bool) -> None:
        """Run a function of the model over micro-batches, which must be the same on all stages.

        Args:
            micros: the micro-batches of one step.
            forward: calls the model once. On the last stage it runs to its end, and returns a loss if `trains`; on
                other stages it is left at the end of the stage.
            dtype: dtype of the hidden states sent between stages.
            trains: also run the backward pass, which accumulates gradients.
        """
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        cut, count = self.cut, len(micros)
        width = self.cut.stack.embedding.embedding_dim
        longest = max(num_tokens(micro) for micro in micros) + (0 if trains else TAIL)  # rows may be scored with a tail
        states = torch.empty(1, longest, width, dtype=dtype, device="meta", requires_grad=trains)
        module = _StageModule(cut, micros, forward, states.shape, dtype, trains)
        stage = _reporting_stage()(
            module,
            cut.stage,
            cut.num_stages,
            self.device,
            input_args=(torch.empty(1, 1, device="meta") if cut.stage == 0 else states,),
            output_args=(torch.empty((), dtype=dtype, device="meta") if cut.is_last else states,),
            group=self.group,
        )
        kind = Schedule1F1B if self.schedule == "1f1b" and trains and count >= cut.num_stages else ScheduleGPipe
        schedule = kind(stage, count, loss_fn=(lambda loss, _: loss) if trains else None, scale_grads=False)
        numbers = torch.arange(count)
        inputs = (torch.zeros(count, 1),) if cut.stage == 0 else ()
        with cut.running():
            try:
                schedule.step(
                    *inputs, number=numbers, target=numbers if trains and cut.is_last else None, return_outputs=False
                )
            except RuntimeError as error:
                if isinstance(error.__cause__, Exception) and "failed to run forward" in str(error):
                    raise error.__cause__ from None
                raise


class _StageModule(nn.Module):
    """The module that the torch schedule calls: one micro-batch through this stage."""

    def __init__(
        self,
        cut: StageCut,
        micros: Sequence[MicroBatch],
        forward: Forward,
        shape: torch.Size,
        dtype: torch.dtype,
        trains: bool,
    ):
        super().__init__()
        self.cut, self.micros, self.function, self.shape, self.dtype = cut, micros, forward, shape, dtype
        self.trains = trains

    def forward(self, states: Tensor, number: Tensor) -> Tensor:
        micro = self.micros[int(number)]
        output = self.cut.run(lambda: self.function(micro), states[0] if self.cut.stage else None)
        report()
        if self.cut.is_last:
            return output if output is not None else torch.zeros((), dtype=self.dtype)
        assert output is not None
        line = output.reshape(-1, output.shape[-1]).to(self.dtype)
        padded = torch.cat([line, line.new_zeros(self.shape[1] - len(line), line.shape[1])])[None]
        return padded.requires_grad_() if self.trains and not padded.requires_grad else padded


def _reporting_stage() -> Any:
    """A torch `PipelineStage` whose backward passes report progress; `_StageModule` does so of forward passes."""
    from torch.distributed.pipelining import PipelineStage

    class ReportingStage(PipelineStage):
        def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
            super().backward_one_chunk(*args, **kwargs)
            report()

    return ReportingStage


def refuse_untrue(model: Any) -> None:
    """Refuse a model that cannot be split into stages with the same results, or whose family was not tried in stages.

    Raises:
        ConfigError: it is such a model, or has no stack of layers.
    """
    base = unwrapped(model)
    decoder_stack(base)
    record = record_of(base)
    config = base.config.get_text_config()
    multiplier = getattr(config, "embedding_multiplier", None)
    if isinstance(record, str):
        fault = f"it was not tried in pipeline stages: {record}"
    elif not record.stages or multiplier != getattr(type(config), "embedding_multiplier", multiplier):
        fault = (
            "its results change when it is split into pipeline stages: it computes more than embedding, layers, norm"
        )
    elif shared := getattr(config, "num_kv_shared_layers", None) or 0:
        fault = f"its last {shared} layers attend to keys of earlier ones, which may be in another stage"
    else:
        return
    raise ConfigError(
        f"model is a {type(base).__name__}: {fault}. Set sharding.pp=1, and shard it with sharding.tp or "
        "sharding.dp_shard."
    )


class WholeWeights:
    """Gathers the weights of all stages in every stage, for generation, by a resharding plan that is computed once.

    Args:
        model: this process holds one stage of it.
        cut: the split of the model.
        group: process group of the stages, in order.
        device: the device of this stage.
    """

    def __init__(self, model: nn.Module, cut: StageCut, group: Any, device: torch.device):
        self.model, self.cut, self.group, self.device = model, cut, group, device
        self._plan: Plan | None = None

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside this context the process has the whole model. All stages enter and leave together."""
        owners = parameter_owners(self.model)
        named = dict(self.model.named_parameters())
        plan = self._plan = self._plan or self._make_plan(named)
        missing = {name: x for name, x in named.items() if is_on_other_stage(x)}
        moves = reshard(
            plan,
            lambda name: local(named[name]).detach().to(self.device),
            self.cut.stage,
            dtypes={name: x.dtype for name, x in named.items()},
            device=self.device,
            group=self.group,
            lend=True,
        )
        try:
            for name, x in moves:
                if name in missing:
                    whole = _like(missing[name], x)
                    for module, key in owners[id(missing[name])]:
                        module._parameters[key] = whole
            yield
        finally:
            for parameter in missing.values():
                for module, key in owners[id(parameter)]:
                    module._parameters[key] = parameter

    def _make_plan(self, named: Mapping[str, Tensor]) -> Plan:
        held, needed = {}, {}
        for name, x in named.items():
            stage, shape = getattr(x, "pipeline_stage", None), tuple(local(x).shape)
            held[name] = TensorLayout(shape, stage=stage, itemsize=x.element_size())
            needed[name] = TensorLayout(shape, itemsize=x.element_size())
        mesh = Mesh((("pp", self.cut.num_stages),))
        return reshard_plan(Layout(mesh, held), Layout(mesh, needed))


def _like(parameter: Tensor, part: Tensor) -> nn.Parameter:
    """A parameter like this one, with `part` as its local data."""
    if is_divided(parameter):
        from torch.distributed.tensor import DTensor

        part = DTensor.from_local(
            part,
            parameter.device_mesh,  # type: ignore[attr-defined]
            parameter.placements,  # type: ignore[attr-defined]
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(part, requires_grad=False)


@dataclass(frozen=True)
class _ShardedWeight:
    """A sharded parameter and the modules that use it; several where it is tied."""

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter in the stage: whole, or the slice of a tensor-parallel rank or an expert's owner."""
        shape = list(self.parameter.shape)
        for number, placement in enumerate(self.parameter.placements[1:], start=1):  # type: ignore[attr-defined]
            if hasattr(placement, "dim"):
                shape[placement.dim] //= self.parameter.device_mesh.size(number)  # type: ignore[attr-defined]
        return torch.Size(shape)

    @property
    def rows(self) -> int:
        """Rows of each shard; the last shards may have fewer."""
        return -(-self.shape[0] // self.parameter.device_mesh.size(0))  # type: ignore[attr-defined]

    @property
    def part_numel(self) -> int:
        """Elements of a shard, padded to `rows`."""
        return self.rows * self.shape[1:].numel()


def shard_rows(data: Tensor, mesh: Any, device: torch.device | str) -> Tensor:
    """Shard a tensor by its first dimension over a mesh, without communication.

    Args:
        data: the whole tensor, or one sharded over tensor-parallel ranks or owners of experts; on the meta device it
            gives uninitialised memory.
        mesh: of one dimension, and for sharded data a second one, over which it is sharded.
        device: of the shard.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    shard, inner = local(data), list(getattr(data, "placements", ()))
    assert mesh.ndim == 1 + len(inner), (mesh, inner)
    count, rank = mesh.size(0), mesh.get_local_rank(0)
    rows = -(-shard.shape[0] // count)
    first = min(rank * rows, shard.shape[0])
    shard = shard[first : min(first + rows, shard.shape[0])].detach()
    shard = torch.empty_like(shard, device=device) if shard.is_meta else shard.to(device, copy=True).contiguous()
    # A slice's rows are cut again: the mesh's first dimension then divides what its second has left.
    by_rows = _StridedShard(0, split_factor=mesh.size(1)) if inner and inner[0] == Shard(0) else Shard(0)
    return DTensor.from_local(shard, mesh, [by_rows, *inner], run_check=False, shape=data.shape, stride=data.stride())


class StageShards:
    """The sharded weights of one stage of a model.

    Args:
        model: its parameters that `shard_rows` put on the mesh are handled; others are left alone.
        mesh: of one dimension.
        divided_mesh: mesh of the tensor-parallel ranks, or owners of experts, that share some of them.
    """

    def __init__(self, model: nn.Module, mesh: Any, divided_mesh: Any):
        self._group, self._size, self._divided_mesh = mesh.get_group(), mesh.size(), divided_mesh
        (dimension,) = mesh.mesh_dim_names
        weights: dict[int, _ShardedWeight] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and dimension in mesh_dims(parameter):
                    weight = weights.setdefault(id(parameter), _ShardedWeight(parameter, []))
                    weight.owners.append((module, name))
        self._weights = list(weights.values())

    @contextlib.contextmanager
    def whole(self, trains: bool = False) -> Iterator[None]:
        """Inside this context the process has the whole parameters of the stage. Collective on entry and on exit.

        Args:
            trains: on exit gradients are reduce-scattered, so that every process has its shard of their sum.
        """
        local = [weight for weight in self._weights if not is_on_other_stage(weight.parameter)]
        gathered = dict(zip(map(id, local), self._gather([weight.parameter for weight in local]), strict=True))
        wholes: list[tuple[_ShardedWeight, nn.Parameter]] = []
        try:
            for weight in self._weights:
                p = weight.parameter
                data = gathered.get(id(weight))
                data = torch.empty(weight.shape, dtype=p.dtype, device="meta") if data is None else data
                whole = nn.Parameter(self._as_divided(p, data), requires_grad=p.requires_grad and trains)
                at_stage_of(p, whole)
                wholes.append((weight, whole))
                for module, name in weight.owners:
                    module._parameters[name] = whole
            gathered.clear()
            yield
            if trains:
                self._reduce([(w.parameter, x) for w, x in wholes if not is_on_other_stage(x) and x.requires_grad])
        finally:
            for weight, _ in wholes:
                for module, name in weight.owners:
                    module._parameters[name] = weight.parameter

    def _as_divided(self, parameter: Tensor, data: Tensor) -> Tensor:
        """Parameter that the stage runs with: where others divide it, a slice that stands for the whole."""
        remaining = parameter.placements[1:]  # type: ignore[attr-defined]
        if not remaining:
            return data
        from torch.distributed.tensor import DTensor

        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(data, self._divided_mesh, remaining, run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def _gather(self, parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
        for bucket in buckets(parameters):
            weights = [_ShardedWeight(parameter, []) for parameter in bucket]
            sent = torch.cat([_padded(local(w.parameter), w.part_numel) for w in weights])
            received = sent.new_empty(self._size * len(sent))
            dist.all_gather_single(received, sent, group=self._group)
            parts = received.view(self._size, -1).split([w.part_numel for w in weights], dim=1)
            for weight, x in zip(weights, parts, strict=True):
                shape = weight.shape
                yield x.reshape(self._size * weight.rows, *shape[1:])[: shape[0]].contiguous()
            report()

    @torch.no_grad()
    def _reduce(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Reduce-scatter gradients over the processes; a missing gradient counts as zeros."""
        whole_of = {id(parameter): whole for parameter, whole in pairs}
        for bucket in buckets([parameter for parameter, _ in pairs]):
            weights, columns = [_ShardedWeight(parameter, []) for parameter in bucket], []
            for weight in weights:
                whole = whole_of[id(weight.parameter)]
                grad: Any = torch.zeros_like(whole) if whole.grad is None else whole.grad
                whole.grad = None
                if is_divided(grad) and grad.placements != whole.placements:  # type: ignore[attr-defined]
                    grad = grad.redistribute(placements=whole.placements)  # type: ignore[attr-defined]
                grad = local(grad)
                columns.append(_padded(grad, self._size * weight.part_numel).view(self._size, -1))
            sent = torch.cat(columns, dim=1).flatten()
            shard = sent.new_empty(len(sent) // self._size)
            dist.reduce_scatter_single(shard, sent, group=self._group)
            for weight, x in zip(weights, shard.split([w.part_numel for w in weights]), strict=True):
                add_gradient(weight.parameter, x)
            report()


def _padded(x: Tensor, numel: int) -> Tensor:
    flat = x.reshape(-1)
    return flat if len(flat) == numel else torch.cat([flat, flat.new_zeros(numel - len(flat))])


class PipelineParallelism(ShardedParallelism):
    """Process mesh with pipeline stages.

    Args:
        context: build context of the role.
        timeout_s: limit of one collective operation.
        degrees: sizes of the mesh.
        schedule: order of forward and backward passes.
        least_micro_batches: micro-batches that the rows of a step are split into at least.
        cp_style: see `verl.model_paths.context_attention`.
    """

    def __init__(
        self,
        context: BuildContext,
        timeout_s: float,
        degrees: ParallelDegrees,
        *,
        schedule: Schedule,
        least_micro_batches: int,
        cp_style: ContextStyle = "allgather",
    ):
        super().__init__(context, timeout_s, degrees, fully=False, cp_style=cp_style)
        self.schedule: Schedule = schedule
        self.least_micro_batches = least_micro_batches
        self.stage, self.num_stages = self.rank // (self.world_size // degrees.pp), degrees.pp
        self.stage_group = self._device_mesh[STAGE].get_group()
        self._last = self.dist.get_global_rank(self.stage_group, degrees.pp - 1)
        stage_size = self.world_size // degrees.pp
        shares = [degrees.row_share(rank) for rank in range(self.world_size)]
        self._row_ranks = tuple(rank for rank, share in enumerate(shares) if share == shares[self.rank])
        self._row_group = self._group(shares.__getitem__)
        self._ends_group = self._group(lambda rank: (rank % stage_size, rank // stage_size in (0, degrees.pp - 1)))
        self._models: dict[int, tuple[PipelineRunner, torch.dtype, list[StageShards]]] = {}
        # processes of other pipelines have experts for this one's tokens
        self.needs_equal_micro_batches = degrees.ep > 1
        self._stages: dict[int, tuple[int, ...]] = {}  # of parameters, by id
        self._kept: list[Any] = []  # keeps the parameters alive, so that no `id` is reused

    def shard_model(self, model: nn.Module, autocast: Autocast = None) -> None:
        """See `Parallelism.shard_model`. Raises ConfigError for a model that cannot be cut into stages."""
        core: Any = head_of(model).backbone
        refuse_untrue(core)
        stack = decoder_stack(core)
        if len(stack.layers) < self.num_stages:
            raise ConfigError(
                f"sharding.pp is {self.num_stages}: the model has {len(stack.layers)} layers, and every stage needs "
                f"at least one. Set it to at most {len(stack.layers)}."
            )
        costs, of_head = layer_costs(stack, output_head(model))
        partial = shard_over(core, self._device_mesh[TENSOR]) if self.mesh.extent(TENSOR) > 1 else []
        experts = [] if self._expert_mesh is None else divide_experts(core, self._expert_mesh[EXPERT])
        cut = StageCut(stack, stage_bounds(costs, self.num_stages, of_head), self.stage)
        self._leave_own(model, core, cut.stages_of(model))
        for module in model.modules():
            for name, x in module._buffers.items():
                module._buffers[name] = None if x is None else x.to(self.device)
        if (files := getattr(core, "weight_files", None)) is not None:
            read_slices(core, files)
            del core.weight_files
        named = dict(core.named_parameters())
        self._partial_over_tensor |= {id(named[name]) for name in partial if not is_on_other_stage(named[name])}
        runner = PipelineRunner(cut, self.stage_group, self.device, self.schedule)
        dtype = getattr(torch, autocast) if autocast else next(core.parameters()).dtype
        shards = [StageShards(model, self._device_mesh[SHARD], self._device_mesh[TENSOR])]
        if self._expert_mesh is not None:
            shards.append(StageShards(model, self._expert_mesh[EXPERT_SHARD], self._expert_mesh[EXPERT]))
        stages = WholeWeights(model, cut, self.stage_group, self.device)
        self._models[id(model)] = (runner, dtype, shards)
        info = self._info()
        model.parallel_info = replace(  # type: ignore[assignment]
            info,
            stage_group=self.stage_group,
            siblings=self._row_ranks,
            sibling_group=self._row_group,
            through_stages=functools.partial(self._through_stages, model),
            generation_groups=(self.stage_group, *info.generation_groups),
            gathered=lambda: _all_gathered(shards, stages, experts),
        )

    @torch.no_grad()
    def _leave_own(self, model: nn.Module, core: nn.Module, stages: Mapping[int, tuple[int, ...]]) -> None:
        """Move the parameters of this stage, or shards of them, to the device and free those of other stages; tied
        parameters stay tied.

        A head on the core (a critic's) is small and is not sharded.
        """
        parameters: dict[int, nn.Parameter] = {}
        sharded = {id(p) for p in core.parameters() if p.ndim} if self.mesh.extent(SHARD) > 1 else set()
        everywhere = tuple(range(self.num_stages))
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in parameters:
                    held = stages[id(parameter)]
                    if id(parameter) in sharded:
                        is_own = self.stage in held
                        whole = parameter if is_own else parameter.to("meta")
                        data = shard_rows(whole, self._mesh_of(parameter), self.device if is_own else "meta")
                    elif self.stage not in held:
                        data = parameter.to("meta")
                    elif parameter.is_meta:
                        data = torch.empty_like(parameter, device=self.device)
                    else:
                        data = parameter.to(self.device)
                    trains = parameter.requires_grad
                    moved = data if isinstance(data, nn.Parameter) else nn.Parameter(data, requires_grad=trains)
                    at_stage(moved, None if held == everywhere else held[0])
                    parameters[id(parameter)] = moved
                    self._stages[id(moved)] = held
                module._parameters[name] = parameters[id(parameter)]
        self._kept.append(parameters)

    def _mesh_of(self, x: Tensor) -> Any:
        """Over which a tensor is divided by FSDP; its last dimension is that over which it is divided already."""
        if EXPERT in mesh_dims(x):
            assert self._expert_mesh is not None
            return self._expert_mesh[(EXPERT_SHARD, EXPERT)]
        return self._device_mesh[(SHARD, TENSOR) if is_divided(x) else SHARD]

    def run_micro_batches(
        self,
        micros: Iterable[MicroBatch],
        forward: Callable[[MicroBatch], Tensor | None],
        computing: Callable[[], AbstractContextManager[None]],
        *,
        model: nn.Module,
        trains: bool = False,
    ) -> None:
        """See `Parallelism.run_micro_batches`; without micro-batches all stages return at once."""
        (runner, dtype, shards), batches = self._models[id(model)], list(micros)
        with _whole(shards, trains):
            if batches:
                with computing():
                    runner.run(batches, forward, dtype, trains=trains)

    def _through_stages(self, model: nn.Module, ids: Tensor, function: Callable[[], Tensor]) -> Tensor:
        micro, results = MicroBatch(torch.arange(len(ids)), {"input_ids": ids}), dict[str, Tensor]()

        def forward(_: MicroBatch) -> None:
            results["found"] = function()

        self.run_micro_batches([micro], forward, contextlib.nullcontext, model=model)
        return self.from_last_stage(results)["found"]

    def from_last_stage(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        named = self._broadcast_from_last([(name, x.shape, x.dtype) for name, x in results.items()])
        is_last, received = self.stage == self.num_stages - 1, {}
        for name, shape, dtype in named:
            x = results[name] if is_last else torch.empty(shape, dtype=dtype, device=self.device)
            received[name] = x = x.to(self.device).contiguous()
            self.dist.broadcast(x, src=self._last, group=self.stage_group)
        return received

    def of_each(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        """See `Parallelism.of_each`; the numbers are those of the last stage."""
        return super().of_each(self._broadcast_from_last(dict(values)))

    def _broadcast_from_last(self, value: Any) -> Any:
        """The value of the last stage, on all stages."""
        box = [value]
        self.dist.broadcast_object_list(box, src=self._last, group=self.stage_group)
        return box[0]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        local = [p for p in parameters if not is_on_other_stage(p)]
        super().sum_gradients(local)
        trained = [p for p in local if p.requires_grad]
        if self.mesh.extent(SHARD) > 1 and self.mesh.extent(REPLICATE) > 1:
            replicas = self._device_mesh[REPLICATE].get_group()
            self.sum_over([p for p in trained if {SHARD, EXPERT_SHARD} & set(mesh_dims(p))], replicas)
        everywhere = tuple(range(self.num_stages))
        self.sum_over([p for p in trained if self._stages[id(p)] == everywhere], self.stage_group)
        ends = [p for p in trained if 1 < len(self._stages[id(p)]) < self.num_stages]
        if ends:
            self.sum_over(ends, self._ends_group)

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
        return super().clip([p for p in parameters if not is_on_other_stage(p)], limit)

    def _holders(self, x: Tensor) -> int:
        return super()._holders(x) // self.num_stages * len(self._stages[id(x)])


@contextlib.contextmanager
def _whole(shards: Iterable[StageShards], trains: bool = False) -> Iterator[None]:
    """Within, all weights of the stage are whole in this process, experts in those that have them."""
    with contextlib.ExitStack() as stack:
        for part in shards:
            stack.enter_context(part.whole(trains))
        yield


@contextlib.contextmanager
def _all_gathered(shards: Iterable[StageShards], stages: WholeWeights, experts: list[nn.Module]) -> Iterator[None]:
    """Within, all weights of all stages are whole in this process."""
    with _whole(shards), stages.gathered(), experts_gathered(experts):
        yield
