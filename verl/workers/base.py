"""Base of actor, critic and SFT worker: a trained model, its optimizer, its micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from verl.algorithms.functions import PartState, keeps_state
from verl.component import BuildContext, Description, component
from verl.engines.engine import Packs, TrainingEngine
from verl.engines.layer_compile import COMPILE_LIMITS, COMPILED_EXPERTS, compile_layers, is_worth_compiling
from verl.engines.optimizer import AdamW
from verl.engines.parallel_degrees import ParallelDegrees
from verl.engines.parallel_dims import Parallelism
from verl.engines.sharding import Sharding
from verl.errors import faults_below
from verl.model_paths.check import paths_for
from verl.models.fused_norms import fuse_rms_norms
from verl.models.heads import head_of
from verl.models.hf_state_dict import HFStateDict, hf_state_dict, live_tensors, load_adapter, tokenizer_files
from verl.models.images import freeze, save_tokenizer
from verl.models.lora import LoRA, second_adapter_fault
from verl.models.own_module import ModuleModel
from verl.models.parallel_info import Autocast, release_gathered
from verl.models.pretrained import ModelSource, quiet_transformers
from verl.models.turn_end import save_turn_end
from verl.protocol.dispatch import on_all, on_each
from verl.utils.seeding import RngState, derive_seed, rng_state, seed_everything, set_rng_state
from verl.workers.load_state import (
    CheckpointSelection,
    RemoteRoleState,
    RestoreSource,
    RoleState,
    load_optimizer,
    load_weights,
)
from verl.workers.rank_checkpoint import RankCheckpointWriter, RankInfo, RankSaveSettings, whole_on_first

_log = logging.getLogger(__name__)


ADAPTER_LR_FACTOR = 10.0  # of a low-rank adapter, relative to training all weights


@component
class TrainedRole(Description):
    """A role whose weights are updated.

    Args:
        model: initial weights.
        lora: train a low-rank adapter and leave the model frozen; null trains all weights.
        optimizer: optimizer, and schedule of the learning rate.
        micro_batch_tokens: tokens of one forward and backward pass, padding included. Bounds memory; affects results
            only through rounding.
        autocast: `bfloat16` computes forward, backward and generation in bfloat16, while weights, gradients and
            optimizer state stay in `model.dtype`; null computes in `model.dtype`. `auto` is bfloat16 for float32
            weights on a GPU that supports it, and null elsewhere.
        packing: `auto` runs rows as one sequence of tokens, with shared prompts once, if the model supports it and it
            saves a significant share of tokens; `off` pads. Affects results only through rounding.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about one third more time.
        sharding: sharding of this role; null for that of the run.

    Attributes:
        lr_factor: factor on the learning rate derived from model size, if the optimizer sets none.
        trains: whether its weights are updated; if not, checks and plans of training are skipped.
    """

    lr_factor: ClassVar[float] = 1.0
    trains: ClassVar[bool] = True

    model: ModelSource
    optimizer: AdamW
    lora: LoRA | None = None
    micro_batch_tokens: PositiveInt = 16384
    autocast: Autocast | Literal["auto"] = None
    packing: Packs = "auto"
    gradient_checkpointing: bool = False
    sharding: Sharding | None = None

    def on_device(self, computes_bfloat16: bool) -> Self:
        """This role with `autocast=auto` resolved for a device that does or does not compute in bfloat16."""
        if self.autocast != "auto":
            return self
        return replace(self, autocast="bfloat16" if computes_bfloat16 and self.model.dtype == "float32" else None)

    @property
    def decided_autocast(self) -> Autocast:
        """`autocast` in a process that has called `on_device`."""
        assert self.autocast != "auto", "on_device was not called"
        return self.autocast

    def faults(self) -> Iterator[str]:
        if self.model.compile is True and isinstance(self.model, ModuleModel):
            yield f"model.compile is true: a {type(self.model).__name__} compiles itself. Set model.compile=false."
        if self.lora is not None and isinstance(self.model, ModuleModel):
            yield f"lora is set: a {type(self.model).__name__} has no adapters of peft. Set lora=null."
        elif self.lora is not None and (fault := second_adapter_fault(getattr(self.model, "path", ""))) is not None:
            yield f"lora is set, and model.path {fault}"
        if self.trains and self.lora is None and self.model.dtype in ("bfloat16", "float16"):
            yield (
                f"model.dtype is {self.model.dtype}: training all weights in it silently loses updates that are small "
                "beside their weight. Set model.dtype=float32 and autocast=bfloat16, or train a lora adapter."
            )

    def faults_with_degrees(self, degrees: ParallelDegrees) -> Iterator[str]:
        """Faults of the sharding of this role with its kind of model, each beginning with the name of the field."""
        if degrees.cp > 1 and self.packing == "off":
            yield (
                f"packing is off: processes that share the tokens of a row (cp {degrees.cp}) run it as a packed line. "
                "Set packing=auto, or sharding.cp=1."
            )
        kind = self.model.experts()
        if self.model.compile is True and kind is not None and kind[1] is not None:
            yield f"model.compile is true: a {kind[0]} {COMPILED_EXPERTS}"
        for name in ("tp", "pp", "ep"):
            if self.model.compile is True and getattr(degrees, name) > 1:
                yield f"model.compile is true, and sharding.{name} is {getattr(degrees, name)}: {COMPILE_LIMITS}"

    def load(
        self,
        kind: Literal["causal_lm", "backbone"],
        device: str,
        restore: RestoreSource | None,
        component: str,
        parallel: Parallelism,
        path: str | None = None,
    ) -> Any:
        """The model with the role's initial weights or those of a checkpoint, with its adapter if it trains one.

        It is not sharded yet: the caller does that with `parallel.shard_model`.

        Args:
            path: configuration path of the role, for messages; None for `component`.
        """
        source = self.model if restore is None or self.lora is not None else restore.model(self.model, component)
        with faults_below(f"{path or component}.model"):
            model = load_unsharded(source, kind, device, parallel, sliced=self.lora is None)
        if self.trains:
            freeze(model, self.model.freeze, f"{path or component}.model")
        if self.lora is None:
            return model
        with faults_below(path or component):
            model = self.lora.apply(model, causal_lm=kind == "causal_lm")
        if restore is not None:
            load_adapter(model, restore.adapter(component))
        return model

    def engine(
        self,
        model: nn.Module,
        context: BuildContext,
        parallel: Parallelism,
        total_updates: int,
        restore: RestoreSource | None,
        component: str,
        path: str | None = None,
        longest: int = 1,
    ) -> TrainingEngine:
        """Shard `model` and create the engine that trains it, with the optimizer of a checkpoint if one is given.

        Args:
            path: see `load`.
            longest: maximum tokens of a row, if the context does not set it.
        """
        where, backbone = f"{path or component}.model", head_of(model).backbone
        paths_for(backbone, context.row_tokens or longest, where, shares_tokens=parallel.shares_tokens)
        parallel.shard_model(model, self.decided_autocast)
        if self.gradient_checkpointing:
            enable: Any = model.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        factor = self.lr_factor * (1.0 if self.lora is None else ADAPTER_LR_FACTOR)
        optimizer = self.optimizer.for_model(model, factor, f"{path or component}.")
        engine = TrainingEngine(
            model, parallel, self.micro_batch_tokens, optimizer, total_updates, self.decided_autocast, self.packing
        )
        if restore is not None:
            restore.optimizer(engine, component)
        return engine


def roles_on_device(run: Any, computes_bfloat16: bool) -> Any:
    """A run, or the host of its roles, with `autocast` of actor and critic resolved; see `TrainedRole.on_device`."""
    roles = {name: getattr(run, name, None) for name in ("actor", "critic", "learner")}
    decided = {name: role.on_device(computes_bfloat16) for name, role in roles.items() if isinstance(role, TrainedRole)}
    changed = {name: role for name, role in decided.items() if role is not roles[name]}
    return replace(run, **changed) if changed else run


def load_unsharded(
    source: ModelSource, kind: Literal["causal_lm", "backbone"], device: str, parallel: Parallelism, sliced: bool = True
) -> Any:
    """Load a model for `parallel.shard_model`: on the meta device if slices of its weights can be read, else in full.
    On a GPU its norms use a fused kernel; layers are compiled with `source.compile`.

    Args:
        device: device of the full model if weights are not sharded; otherwise main memory is used.
        sliced: False for a model whose weights must be loaded immediately, such as one with an adapter.
    """
    if isinstance(source, ModuleModel):
        if kind != "causal_lm":
            source.load_backbone(device)
        return source.load_part(str(parallel.device) if parallel.divides_weights else device, parallel.tp_rank)
    model = source.load_skeleton(kind) if parallel.divides_weights and sliced else None
    if model is None:
        if parallel.divides_weights:
            _log.info("every process loads the whole model before it keeps its part: weights cannot be read in slices")
        model = getattr(source, f"load_{kind}")("cpu" if parallel.divides_weights else device)
    if torch.device(device).type != "cpu" and parallel.mesh.extent("tensor") == 1:
        fuse_rms_norms(model)
    if source.compile is True or (source.compile and is_worth_compiling(model, parallel, device)):
        compile_layers(model, parallel, is_optional=source.compile == "auto")
    return model


class TrainedWorker:
    """Base of the running roles that train.

    Attributes:
        engine: trains the model.
        tokenizer: saved with the weights.
        loss: the built loss, which may have state.
        rank_writer: writes this process's part of checkpoints; set by the host.
    """

    def __init__(self, engine: TrainingEngine, tokenizer: Any, loss: Any = None):
        self.engine, self.tokenizer, self.loss = engine, tokenizer, loss
        save_turn_end(engine.model, tokenizer)
        self.rank_writer: RankCheckpointWriter | None = None
        self._tokenizer_files: dict[str, bytes] | None = None

    @on_all
    def save(self, directory: Path) -> None:
        """Write a Hugging Face directory (with LoRA: a peft adapter directory) with the tokenizer; rank 0 writes."""
        model: Any = self.engine.model
        whole = self._whole_weights() if self.engine.parallel.divides_weights else None
        if self.engine.parallel.rank == 0:
            with quiet_transformers():
                model.save_pretrained(directory, state_dict=whole)
            save_tokenizer(self.tokenizer, directory)

    @on_all
    def load(self, component: str, source: CheckpointSelection) -> None:
        """Load weights, optimizer or both from a checkpoint into the live tensors.

        Raises:
            ConfigError: the checkpoint holds another model.
        """
        if source.weights:
            load_weights(self.engine.model, component, source, self.engine.parallel)
        if source.optimizer:
            load_optimizer(self.engine, component, source)

    @on_all
    def state(self, copied: bool) -> RoleState | None:
        """State of this role for a checkpoint, on rank 0; None on other ranks. Collective.

        Args:
            copied: return copies in main memory, for another process, instead of live tensors.
        """
        weights, optimizer = None, self.engine.optimizer_tensors()
        if self.engine.parallel.divides_weights:
            weights, optimizer = self._whole_weights(), whole_on_first(optimizer, self.engine.parallel)
        if self.engine.parallel.rank != 0:
            return None
        form = hf_state_dict(self.engine.model, weights)
        if copied and weights is None:
            form = HFStateDict(_in_main_memory(form.tensors), form.file, form.files)
            optimizer = _in_main_memory(optimizer)
        return RoleState(form, optimizer, self.engine.updates, self.constant_files())

    def constant_files(self) -> dict[str, bytes]:
        if self._tokenizer_files is None:
            self._tokenizer_files = tokenizer_files(self.tokenizer)
        return self._tokenizer_files

    # Methods for the part of a checkpoint that each process writes; called on one role for all roles of a process.

    @on_each
    def check_shared_directory(self, directory: Path, nonce: str) -> RankInfo:
        """See `RankCheckpointWriter.check_shared_directory`."""
        return self._rank_writer.check_shared_directory(directory, nonce)

    @on_all
    def remote_states(self) -> dict[str, RemoteRoleState]:
        return self._rank_writer.states()

    @on_all
    def prepare_save(self, setting: RankSaveSettings) -> None:
        self._rank_writer.prepare(setting)

    @on_each
    def save_part(self, setting: RankSaveSettings, step: int, transaction: Path, nonce: str) -> bool:
        return self._rank_writer.save(setting, step, transaction, nonce)

    @on_all
    def wait_copied(self) -> None:
        self._rank_writer.wait_copied()

    @property
    def _rank_writer(self) -> RankCheckpointWriter:
        assert self.rank_writer is not None, "this role lives in no host"
        return self.rank_writer

    @on_each
    def rng_states(self) -> RngState:
        """The state of the global random generators of the role's process."""
        return rng_state()

    @on_all
    def set_rng_states(self, states: Sequence[RngState], seed: int) -> None:
        """Restore the generators of each rank from `rng_states`; a rank without a state gets a new seed."""
        rank = self.engine.parallel.rank
        if rank < len(states):
            set_rng_state(*states[rank])
        else:
            seed_everything(derive_seed(seed, "rank", rank))

    @on_all
    def loss_keeps_state(self) -> bool:
        return keeps_state(self.loss)

    @on_each
    def loss_states(self) -> dict[str, Any]:
        return PartState(self.loss, "algorithm").state_dict()

    @on_all
    def set_loss_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the state of the loss of each rank; does nothing for an empty sequence."""
        if states:
            PartState(self.loss, "algorithm").load_state_dict(states[self.engine.parallel.rank])

    def _whole_weights(self) -> dict[str, Tensor]:
        """Full weights on rank 0, empty on other ranks; collective."""
        release_gathered(self.engine.model)
        return whole_on_first(live_tensors(self.engine.model), self.engine.parallel)


def _in_main_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
