"""Set-up shared by all trainers, with the checks before a run: process settings, device, save directory, resumed
checkpoint, processes of the roles."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl import config
from verl.checkpoint.commit.upload_state import manifest_digest
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.filesystem import FileSystem
from verl.cluster.local_worker_group import InlineWorkerGroup, LocalWorkerGroup
from verl.cluster.rpc import WorkerGroup
from verl.component import BuildContext, as_plain, hint, nearest
from verl.engines.sharding import Sharding
from verl.errors import ConfigError, faults_below
from verl.models.model_files import WARM_START
from verl.models.pretrained import ModelSource
from verl.ops.cpu_matmul import active_library, chosen_library, use_library
from verl.trainer.config import LoopSettings
from verl.trainer.plan.workload import role_processes
from verl.trainer.state.checkpointing import CheckpointSaver, new_run_id
from verl.trainer.state.save_directory import SaveDirectoryChoice, job_name
from verl.trainer.state.train_state import RankWriters
from verl.trainer.state.training_identity import difference_messages, identity_of, paths_of_texts
from verl.utils.redact import redact_tree
from verl.utils.seeding import derive_seed, seed_everything
from verl.utils.threads import choose_threads
from verl.utils.torchrun import refuse_copies
from verl.workers.base import TrainedRole
from verl.workers.load_state import RestoreSource

_log = logging.getLogger(__name__)
STRICT = "VERL_STRICT_DATA_CHECK"


class ProcessState:
    """Process-wide settings that a run changes; `restore` resets them when the last run in this process has ended."""

    _alive: ClassVar[list[ProcessState]] = []
    _undo: ClassVar[ExitStack] = ExitStack()

    def __init__(self, settings: LoopSettings):
        if not self._alive:
            self._undo.callback(torch.set_num_threads, torch.get_num_threads())
            self._undo.callback(use_library, active_library())
            self._undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            self._undo.callback(_set_strict_data_check, config.strict_data_check, os.environ.get(STRICT))
        self._alive.append(self)
        if isinstance(settings.num_threads, int):
            torch.set_num_threads(settings.num_threads)
        use_library(chosen_library(settings.cpu_matmul))
        if settings.strict_data_check:
            _set_strict_data_check(True, "1")
        seed_everything(derive_seed(settings.seed, "driver"))

    def restore(self) -> None:
        """Restore the settings. Idempotent."""
        if self in self._alive:
            self._alive.remove(self)
            if not self._alive:
                self._undo.close()


def _set_strict_data_check(value: bool, variable: str | None) -> None:
    """Set the check of this process, and of workers, which read the variable."""
    config.strict_data_check = value
    os.environ.pop(STRICT, None)
    os.environ |= {} if variable is None else {STRICT: variable}


def prepare_context(context: BuildContext, settings: LoopSettings) -> BuildContext:
    """The context of the driver: the run's seed, its device, and a directory for results.

    Raises:
        ConfigError: the device does not exist, or torchrun has started several drivers.
    """
    refuse_copies()
    device = settings.device
    with faults_below("trainer"):
        if faults := list(settings.machine_faults()):
            raise ConfigError(faults)
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    run_dir = context.run_dir or Path("outputs") / settings.project_name / settings.experiment_name
    run_dir.mkdir(parents=True, exist_ok=True)
    library = chosen_library(settings.cpu_matmul)
    return replace(context, device=device, seed=settings.seed, run_dir=run_dir, cpu_matmul=library)


def prepare_saving(
    run: Any,
    context: BuildContext,
    loss_key: str,
    uses: Collection[str] = (),
    is_restart: bool = False,
    data: Mapping[str, str] | None = None,
) -> CheckpointSaver:
    """Claim a run's save directory, find the checkpoint that it resumes from, if any, and on a CPU choose its threads.

    Args:
        is_restart: this trainer has trained in its run directory before.
        data: settings determined by the data, see `DataSplits.settled`.
    Raises:
        ConfigError: there is no such checkpoint, or it is of another training, or a directory is another run's.
        BadCheckpoint: it is damaged.
        CheckpointWriteFailed: the directory cannot be written.
    """
    chosen = run.checkpoint
    config = as_plain(run)
    identity = identity_of(config, context.tokenizer) if chosen is not None or run.resume is not None else {}
    identity |= {f"data.{name}": value for name, value in (data or {}).items()} if identity else {}
    run_id = new_run_id()
    job = job_name(context.job, context.swept)
    choice = SaveDirectoryChoice(chosen, run.trainer, job, run.storage, identity, run_id)
    place = choice.choose(run.resume, context.run_dir, is_restart=is_restart)
    point = place.resumed
    if run.trainer.num_threads == "auto" and context.device == "cpu" and run.trainer.n_gpus_per_node == 1:
        saved = point and point.state.get("num_threads")
        width = getattr(run.actor.model.load_config().get_text_config(), "hidden_size", 256)
        if line := choose_threads(width, run.actor.autocast, saved if isinstance(saved, int) else None):
            _log.info("CPU: %s.", line)
    if point is not None:
        _log.info("Resuming from %s, step %d (%s).", point.checkpoint.directory, point.step, point.why)
        for line in difference_messages(point, redact_tree(config)):
            _log.warning("differs from the resumed run: %s", line)
    return CheckpointSaver(chosen, place, config, identity, loss_key, uses, run_id)


def metric_faults(run: Any, evaluated: Sequence[str]) -> Iterator[str]:
    """Faults of settings that name a metric of evaluations.

    Args:
        evaluated: keys of the metrics of this run's evaluations.
    """
    if run.checkpoint is None:
        return
    for name in ("keep_best", "save_best"):
        key = getattr(run.checkpoint, name)
        if key is None or key in evaluated or (name == "keep_best" and not key.startswith("eval/")):
            continue
        where = "evaluations of this run have" if key.startswith("eval/") else "only evaluations are looked at, with"
        yield f"checkpoint.{name} is {key!r}: {where} {', '.join(evaluated)}.{hint(nearest(key, evaluated))}"


def preflight_faults(run: Any, context: BuildContext, uses_storage: bool = False) -> Iterator[str]:
    """Faults of the run directory, the save directory and `resume` that can be found without locking or
    downloading anything.

    Args:
        uses_storage: `run.storage` holds other data than checkpoints too.
    """
    config = as_plain(run)
    unknown = {"tokenizer", *paths_of_texts(config, WARM_START)}
    unknown |= {f"data.{name}" for name in getattr(run.data, "settled_fields", ())}
    job, identity = job_name(context.job, context.swept), functools.partial(identity_of, config, None)
    choice = SaveDirectoryChoice(run.checkpoint, run.trainer, job, run.storage, identity, "", unknown)
    try:
        choice.choose(run.resume, context.run_dir, dry=True, uses_storage=uses_storage)
    except ConfigError as error:
        yield from error.faults


def restore_of(saving: CheckpointSaver) -> RestoreSource | None:
    """Restore information for the roles of a resumed run; `resolve` has verified the checkpoint."""
    point = saving.resumed
    if point is None:
        return None
    storage = point.storage or saving.storage
    manifest = "" if storage is None else manifest_digest(FileSystem(), point.checkpoint)
    return RestoreSource(point.checkpoint.directory, verify=False, storage=storage, manifest=manifest)


def rank_writers_of(
    cluster: WorkerGroup, trained: Mapping[str, Any], settings: Checkpointing | None
) -> RankWriters | None:
    """Rank writers for the processes of the roles; None if the roles are in the driver's process."""
    return None if cluster.shares_memory or settings is None else RankWriters(trained, settings)


def start_cluster(host: Any, settings: LoopSettings, context: BuildContext) -> WorkerGroup:
    """Build the roles in the processes given by `trainer.placement`, or else by their shardings.

    Raises:
        ConfigError: there are fewer GPUs than processes.
    """
    world_size = settings.n_gpus_per_node * settings.nnodes
    if settings.placement is not None:
        return settings.placement.start(host, context, world_size, torch.get_num_threads())
    sharded = {role: sharding for role, sharding in host.shardings().items() if sharding.needs_processes}
    if not sharded:
        return InlineWorkerGroup(host, context)
    if context.device.startswith("cuda") and torch.cuda.device_count() < settings.n_gpus_per_node:
        needed, count = settings.n_gpus_per_node, torch.cuda.device_count()
        raise ConfigError(
            f"trainer.n_gpus_per_node is {needed}: this machine has {count} GPUs. Set it lower, or trainer.device=cpu."
        )
    if world_size == 1:
        names = ", ".join(dict.fromkeys(type(sharding).__name__ for sharding in sharded.values()))
        _log.warning("trainer.n_gpus_per_node is 1: %s has one process, so nothing is sharded.", names)
    num_threads = max(1, torch.get_num_threads() // settings.n_gpus_per_node)
    timeout_s = min(sharding.call_timeout_s for sharding in sharded.values())
    return LocalWorkerGroup(host, context, world_size, num_threads, call_timeout_s=timeout_s)


def placement_faults(settings: LoopSettings, shardings: Mapping[str, Sharding]) -> Iterator[str]:
    """Faults of `trainer.placement` with the roles of a run, by their full config path.

    Args:
        shardings: of each role of the run.
    """
    if settings.placement is None:
        return
    for fault in settings.placement.faults_with(shardings, settings.n_gpus_per_node * settings.nnodes):
        yield f"trainer.placement.{fault}"
    if settings.profile is not None:
        yield "trainer.profile is set: it sees the driver alone, but the work is done elsewhere. Leave it null."


def image_faults(run: Any) -> list[str]:
    """Faults of a run whose prompts have images."""
    faults, rollout, counts = [], getattr(run, "rollout", None), role_processes(run)
    for role, sharding in run.shardings().items():
        degrees = sharding.degrees(counts[role])
        path = f"{role}.sharding" if getattr(getattr(run, role, None), "sharding", None) else "sharding"
        faults += [
            f"{path}.{name} is {getattr(degrees, name)}, and the prompts have images: such rows are divided over "
            f"data-parallel processes alone. Set {path}.{name}=1."
            for name in ("tp", "pp", "cp", "ep")
            if getattr(degrees, name) > 1
        ]
    faults += [] if rollout is None else rollout.faults_with_images()
    return list(dict.fromkeys(faults))


def sharding_faults(run: Any) -> list[str]:
    """Faults of the shardings of a run's roles with the number of processes and the models; each is reported once."""
    settings, shardings, counts = run.trainer, run.shardings(), role_processes(run)
    described = {role: getattr(run, role, None) for role in shardings}
    has_own = {role: getattr(described[role], "sharding", None) is not None for role in shardings}
    paths = {role: f"{role}.sharding" if has_own[role] else "sharding" for role in shardings}
    whole = [role for role, sharding in shardings.items() if not sharding.needs_processes]
    is_placed = settings.placement is not None  # the placement determines the processes of each role, and checks them
    if not is_placed and whole and counts[whole[0]] > 1:
        count, path = counts[whole[0]], paths[whole[0]]
        return [f"trainer.n_gpus_per_node is {count}: {path}=none runs in one process. Set it to 1, or {path}=fsdp."]
    if len(whole) < len(shardings) and settings.profile is not None:
        return ["trainer.profile is set: it sees the driver alone, but the work is done elsewhere. Set sharding=none."]
    if len(whole) < len(shardings) and ":" in settings.device:
        return [f"trainer.device is {settings.device!r}: each process needs its own GPU. Set it to cuda or auto."]
    in_processes = {role: sharding for role, sharding in shardings.items() if not is_placed or counts[role] > 1}
    sizes = {role: sharding.size_fault(counts[role]) for role, sharding in in_processes.items()}
    if faults := [f"{paths[role]}.{fault}" for role, fault in sizes.items() if fault is not None]:
        return list(dict.fromkeys(faults))
    indivisible: dict[str, str] = {}
    with_degrees: list[str] = []
    for role, sharding in in_processes.items():
        if not isinstance(trained := described[role], TrainedRole):
            continue
        found = trained.faults_with_degrees(sharding.degrees(counts[role]))
        with_degrees += (f"{role}.{fault}" for fault in found)
        model: ModelSource = trained.model
        layers = model.layer_count()
        divided = {
            "heads": (sharding.heads_fault, model.attention_heads()),
            "layers": (sharding.layers_fault, None if layers is None else (layers,)),
            "experts": (sharding.experts_fault, model.experts()),
        }
        for name, (fault_of, size) in divided.items():
            if size is not None and (fault := fault_of(*size, counts[role])) is not None:
                indivisible.setdefault(paths[role], f"{paths[role]}.{fault} ({name} of {role}.model)")
    return [*indivisible.values(), *with_degrees]
