"""Pipeline parallelism: each process holds some layers of a model, and micro-batches pass through the stages.

stage 0      embedding, layers ──states──> stage 1      layers ──states──> last stage      layers, norm, head, loss
             <──gradients──                             <──gradients──

A stage runs the unchanged function of the role (loss, log-probs) on the unchanged model class: layers of other stages
are identities, the embedding of a later stage returns the hidden states that it received, and the final norm of an
earlier stage ends the forward pass. The schedules are those of `torch.distributed.pipelining`. Their receive buffers
have one shape for all micro-batches of a step, so hidden states are sent as one line of tokens, padded to the longest.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from verl.engines.fsdp import parameter_places
from verl.errors import ConfigError
from verl.model_paths.check import record_of
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import head_of
from verl.models.structure import unwrapped
from verl.ops.resharding.dtensor import is_divided, is_on_other_stage, local
from verl.ops.resharding.execute import reshard
from verl.ops.resharding.layout import Layout, Mesh, TensorLayout
from verl.ops.resharding.plan import Plan, reshard_plan
from verl.utils.progress import report

Schedule = Literal["gpipe", "1f1b"]
Forward = Callable[[MicroBatch], Tensor | None]

_log = logging.getLogger(__name__)


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
        places: list[tuple[Any, int]] = [(self.stack.embedding, 0), (self.stack.norm, self.num_stages - 1)]
        places += [(head, self.num_stages - 1)] if head is not None else []
        for stage in range(self.num_stages):
            places += [(layer, stage) for layer in self.stack.layers[self.bounds[stage] : self.bounds[stage + 1]]]
        for module, stage in places:
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
        states = torch.empty(
            1, max(num_tokens(micro) for micro in micros), width, dtype=dtype, device="meta", requires_grad=trains
        )
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
        places = parameter_places(self.model)
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
                    for module, key in places[id(missing[name])]:
                        module._parameters[key] = whole
            yield
        finally:
            for parameter in missing.values():
                for module, key in places[id(parameter)]:
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
