"""The training loop, and the base class of trainers: data order, evaluation, progress, saving, orderly shutdown.

evaluate ── [ step ── log ── evaluate every eval_interval steps ── checkpoint if due ] × num_steps ── save ── close
              ^ one batch of the sampler's order

`fit` runs the whole loop; a `TrainLoop` can also be run step by step. `LoopTrainer` is the base of the trainers.

With `trainer=ray` a run that loses a worker, or one of whose workers hangs, restarts from its last checkpoint, at most
`trainer.placement.max_restarts` times; otherwise it ends with `WorkerDied` or `WorkerHung`:

fit ──> WorkerDied (WorkerHung included) ──> the last checkpoint ──> new workers ──> fit
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from verl.checkpoint.core.filesystem import write_errors
from verl.checkpoint.read.discovery import POLICY_RECORD, CheckpointDirectory
from verl.checkpoint.resolve import ResumePoint
from verl.checkpoint.save.save_request import SaveOutcome
from verl.cluster.rpc import WorkerGroup
from verl.component import BuildContext, as_plain
from verl.data.base import Dataset, DataSplits, largest_token, named_source, report_counts
from verl.data.curriculum import sampler_of
from verl.data.sampler import DataSampler
from verl.errors import (
    CheckpointFenced,
    CheckpointNotFound,
    ConfigError,
    VerlError,
    WorkerDied,
    WorkerError,
    error_text,
)
from verl.models.pretrained import ModelSource
from verl.protocol import DataProto
from verl.tracking.base import TrackerSet
from verl.tracking.logging_setup import IN_RUN_LOG
from verl.trainer.guards import Guards, stage
from verl.trainer.plan.run_plan import RunPlan, log_plan
from verl.trainer.setup import ProcessState, image_faults, prepare_context
from verl.trainer.state.checkpointing import CheckpointSaver, rate_of
from verl.trainer.state.driver_state import WHEN_BUILT, PartStates, Stateful, load_parts
from verl.trainer.state.lineage import record_environment
from verl.trainer.timers import Profiler, StageTimers
from verl.utils.external_input import plain, write_whole
from verl.utils.memory import forget_peak, peak_memory
from verl.utils.redact import redact, redact_tree
from verl.utils.seeding import derive_seed
from verl.utils.signals import StopRequest, component_exits, interruption
from verl.workers.load_state import SavedRoleState

_log = logging.getLogger(__name__)


@dataclass
class TrainResult:
    """Result of a run.

    Attributes:
        status: `finished`, `stopped` by `stop_after` or before a time limit, `interrupted`, `failed`, or `restarting`
            after a worker was lost: the run continues from a checkpoint, and writes its result again.
        steps: completed steps.
        samples: rows that those steps trained on.
        evaluations: step -> metrics; step 0 is before training.
        wall_s: seconds from the first evaluation to the last.
        train_s: seconds of these in training steps.
        saved: directories of weights.
        checkpoints: names of saved checkpoints.
        saves: cost of each save: `stall_s` of the step, `total_s` until it was durable, `bytes`.
        error: the error of a failed run, or the lost worker of a restarting one.
        data: number of training and evaluation rows, of duplicates, and of rows that are in both.
        restarts: the lost worker of each automatic restart.
    """

    run_dir: Path
    status: str = "failed"
    steps: int = 0
    samples: int = 0
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    last_metrics: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    train_s: float = 0.0
    saved: list[Path] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    restarts: list[str] = field(default_factory=list)
    data: dict[str, int] = field(default_factory=dict)

    def as_plain(self) -> dict[str, Any]:
        return {**vars(self), "run_dir": str(self.run_dir), "saved": [str(path) for path in self.saved]}


class LoopTrainer(ABC):
    """A running trainer: roles in their processes, data, trackers and checkpoints. The training loop calls its steps.

    Call `close` when done, or use it as a context manager.

    Attributes:
        description: the run's description, written next to the results.
        settings: of the loop and the trainer.
        cluster: the processes of the roles; None when they are closed.
        saving: a `CheckpointSaver`; None before it is made.
        restarts: reason of each restart.
    """

    description: Any
    settings: Any
    tracker: TrackerSet
    stages: StageTimers
    guards: Guards
    train_data: Dataset
    eval_data: Dataset | None
    data_counts: dict[str, int]
    sampler: DataSampler
    num_steps: int
    run_dir: Path
    context: BuildContext
    cluster: WorkerGroup | None
    saving: Any

    def __init__(self, run: Any, context: BuildContext):
        self.restarts: list[str] = []
        self._context = context  # kept for a rebuild
        self._start(run, context)

    def _start(self, run: Any, context: BuildContext) -> None:
        self.description, self.settings = run, run.trainer
        self.cluster = self.saving = None
        self._state = ProcessState(run.trainer)
        try:
            self._build(run, prepare_context(context, run.trainer))
            if (point := self.saving.resumed) is not None:
                load_parts(point, self.parts, WHEN_BUILT)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _build(self, run: Any, context: BuildContext) -> None:
        """Load data and weights, and start the processes of the roles; sets every attribute."""

    @abstractmethod
    def step(self, batch: DataProto, step: int) -> dict[str, float]:
        """One training step, number `step` from 1; returns its metrics."""

    @stage
    def optimizer_step(
        self, rows: DataProto, name: str, role: Any, described: Callable[[], DataProto]
    ) -> dict[str, float]:
        """One optimizer step of a role; returns its metrics.

        Args:
            name: of the metrics.
            described: gives the rows with their texts, for reports.
        """
        return role.update(rows).result()

    @abstractmethod
    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the weights after `step` steps."""

    @property
    @abstractmethod
    def trained(self) -> dict[str, Any]:
        """Handles of the roles whose weights are updated, by name."""

    @property
    @abstractmethod
    def parts(self) -> dict[str, Stateful]:
        """The stateful objects of the driver, saved in checkpoints; see `verl.trainer.state.driver_state`."""

    def _use_data(self, splits: DataSplits, batch_size: int, setting: str) -> None:
        """Use data sets; `setting` is the path of the batch size, for messages.

        Raises:
            ConfigError: they have images, which the run cannot train on, or tokens that the model does not know.
        """
        model = self.description.actor.model
        known = model.vocabulary() if isinstance(model, ModelSource) else None
        if known is not None and (largest := largest_token(splits)) >= known:
            raise ConfigError(
                f"actor.model has embeddings of {known} tokens, and the data have token {largest}: its tokenizer has "
                "tokens that were added without model.resize_token_embeddings. Resize the model, or give its own "
                "tokenizer."
            )
        has_images = getattr(splits, "has_images", False) or getattr(
            getattr(self.description, "environment", None), "images", False
        )
        if has_images and (faults := image_faults(self.description)):
            raise ConfigError(faults)
        self.train_data, self.eval_data = splits.train, splits.eval
        self.data_counts, self.settled_data = report_counts(splits), splits.settled
        seed, source = derive_seed(self.settings.seed, "data order"), named_source(self.description.data)
        options = {"seed": seed, "batch_size_name": setting, "mixture": splits.mixture, "source": source}
        options["fills"] = splits.fills_last
        curriculum = getattr(self.description.data, "curriculum", None)
        self.sampler = sampler_of(curriculum, splits.train, batch_size, **options)
        self.num_steps = self.settings.num_steps(self.sampler.batches_of)

    def evaluates_after(self, step: int) -> bool:
        """Whether the weights after this step are evaluated, if there are held-out rows."""
        interval = self.settings.eval_interval
        return step == self.num_steps or (interval > 0 and step % interval == 0)

    def _plan(self, context: BuildContext) -> RunPlan | None:
        """Plan the run with the lengths of its rows, and add messages for its start; None if nothing trains."""
        sampler = self.sampler
        if (point := self.saving.resumed) is not None and sampler.fills:
            sampler.fills = bool(point.read_json("dataloader/state.json").get("fills"))
            self.num_steps = self.settings.num_steps(sampler.batches_of)
        if (remaining := sampler.size % sampler.batch_size) and self.num_steps >= sampler.batches_per_epoch:
            how = "and further ones of the next epoch" if sampler.fills else "which are left out"
            self.saving.messages.append(f"Data: an epoch of {sampler.size} rows ends with {remaining} rows, {how}.")
        if not (run := self.description).actor.trains:
            return None
        limit = next((key for key in ("max_length", "max_prompt_length") if hasattr(run.data, key)), None)
        if limit is not None and (longest := self.longest_row()) is not None:
            run = replace(run, data=replace(run.data, **{limit: max(2, longest)}))
        plan = log_plan(run, context, self.saving.directory)
        self.saving.messages += [] if plan is None else [f"Plan: {plan.summary()}."]
        if context.cpu_matmul != "mkl" and context.device == "cpu":
            self.saving.messages.append(
                "Large float32 products on the CPU are computed by oneDNN (trainer.cpu_matmul=mkl: by MKL)."
            )
        return plan

    def longest_row(self) -> int | None:
        """Tokens of the longest row, of prompts without their responses, if the data provide it."""
        longest = [getattr(data, "longest", None) for data in (self.train_data, self.eval_data) if data is not None]
        known = [tokens for tokens in longest if tokens is not None]
        return max(known) if len(known) == len(longest) else None

    def save(self, directory: Path) -> list[Path]:
        """Write the trained roles as Hugging Face directories below `directory`; returns these."""
        paths = [directory / name for name in self.trained]
        for path, role in zip(paths, self.trained.values(), strict=True):
            path.mkdir(parents=True, exist_ok=True)  # transformers only logs write errors
            role.save(path).result()
        return paths

    def state(self, without: Collection[str] = ()) -> tuple[dict[str, SavedRoleState], PartStates]:
        """State for a checkpoint: of the roles by name, and of the driver's objects, except `without`; see
        `TrainState.of`."""
        assert self.cluster is not None
        roles = self.saving.states_of(self.trained, self.cluster.shares_memory)
        return roles, {name: part.state_dict() for name, part in self.parts.items() if name not in without}

    def fit(self) -> TrainResult:
        """Train to the end; see `fit`. In Ray, a lost worker costs the steps since the last save."""
        return fit_with_restarts(
            self, lambda may_restart: fit(self, may_restart=may_restart), self.settings.max_restarts
        )

    def restart(self, resume: str | None, why: str) -> None:
        """Rebuild everything and continue from a checkpoint, or from the beginning if `resume` is None."""
        self.close()
        self.restarts.append(why)
        self._start(replace(self.description, resume=resume), self._context)

    def close(self) -> None:
        """Stop the workers, free the weights, and restore the process settings that the run changed."""
        if self.saving is not None:
            self.saving.close()
        if self.cluster is not None:
            self.cluster.close()
            self.cluster = None
        self._state.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def fit_with_restarts(trainer: LoopTrainer, fit: Callable[[bool], TrainResult], max_restarts: int) -> TrainResult:
    """Train to the end, with restarts after lost workers.

    Args:
        fit: trains from the current step; its argument is whether a restart follows a lost worker.
    Raises:
        WorkerDied: a worker was lost, and the run has no checkpoints or no restarts left.
    """
    resume, why = None, None
    while True:
        try:
            if why is not None:
                trainer.restart(resume, why)  # may lose a worker too
            return fit(max_restarts > 0 and _restart_fault(trainer, max_restarts) is None)
        except WorkerDied as error:
            if not max_restarts:
                raise
            if (reason := _restart_fault(trainer, max_restarts)) is not None:
                detail = f"{error.detail}\n{reason}"
                raise type(error)(error.rank, error.call, error.step, detail, error.process) from error
            why = str(error).splitlines()[0].rstrip(":")
            resume = last_checkpoint_of(trainer.saving) or trainer.description.resume
            where = "the beginning, for it had saved nothing yet" if resume is None else resume
            number = len(trainer.restarts) + 1
            _log.warning("Restart %d of at most %d, from %s: %s", number, max_restarts, where, why)


def _restart_fault(trainer: LoopTrainer, max_restarts: int) -> str | None:
    """Why the run cannot be restarted automatically; None if it can."""
    if not trainer.saving.is_wanted:
        return "The run keeps no checkpoints, so it cannot go on by itself. Set checkpoint=async."
    if len(trainer.restarts) >= max_restarts:
        return f"The run was restarted {max_restarts} times before, and trainer.placement.max_restarts allows no more."
    return None


def last_checkpoint_of(saving: CheckpointSaver) -> str | None:
    """The last checkpoint that this run published, not one of another run in the same directory."""
    try:
        complete = CheckpointDirectory(saving.directory).complete()
    except CheckpointNotFound:
        return None
    of_run = [checkpoint for checkpoint in complete if checkpoint.manifest.run_id == saving.run_id]
    return str(of_run[-1].directory) if of_run else None


def fit(trainer: LoopTrainer, loop: TrainLoop | None = None, *, may_restart: bool = False) -> TrainResult:
    """Train to the end: from the start, from the trainer's checkpoint, or from the current step of a loop.

    On SIGTERM and Ctrl-C the current step is finished and saved, and `Terminated` or KeyboardInterrupt is raised. A
    second signal raises immediately, without a save.

    Args:
        may_restart: the caller restarts the run after a lost worker.
    """
    loop = TrainLoop(trainer, as_plain(trainer.description)) if loop is None else loop
    result = loop.result
    loop.open()
    stop = StopRequest()
    forget_peak()
    try:
        with component_exits(), stop.listening():
            loop.run(stop)
        if stop:
            raise interruption(stop.signal)
        result.status = "finished" if result.steps == trainer.num_steps else "stopped"
    except BaseException as error:
        loop.failed(error, may_restart=may_restart)
        raise
    finally:
        loop.end()
    return result


def _result_so_far(trainer: LoopTrainer) -> TrainResult:
    """The result so far: empty, or as recorded in the checkpoint."""
    result, point = TrainResult(run_dir=trainer.run_dir, restarts=list(trainer.restarts)), trainer.saving.resumed
    result.data = dict(trainer.data_counts)
    if point is not None:
        done = point.state.get("progress", {})
        result.steps, result.samples = point.step, done.get("samples", 0)
        result.wall_s, result.train_s = point.state.get("wall_clock_s", 0.0), done.get("train_s", 0.0)
        result.evaluations = {int(step): metrics for step, metrics in done.get("evaluations", {}).items()}
    return result


class TrainLoop:
    """A run, one step at a time: open ── [ step ] × any number ── end.

    Args:
        config: of the run, as plain values, for the trackers.
    Attributes:
        result: the result so far.
        is_open, is_over: whether trackers and checkpoints were started, and closed.
    """

    def __init__(self, trainer: LoopTrainer, config: dict[str, Any]):
        self.trainer, self.config = trainer, config
        self.result = _result_so_far(trainer)
        self.profiler = Profiler(trainer.settings.profile, trainer.run_dir)
        self.is_open = self.is_over = self._is_begun = self._is_prepared = False
        self._rows: Tensor | None = None
        self._started = time.perf_counter()

    def open(self) -> None:
        """Record the environment and start the trackers. Idempotent."""
        if self.is_open:
            return
        trainer, saving = self.trainer, self.trainer.saving
        record_environment(trainer.run_dir, saving.code)
        name = f"{trainer.settings.project_name}/{trainer.settings.experiment_name}"
        self._started = time.perf_counter()
        if saving.resumed is not None:
            trainer.tracker.resume(saving.resumed.state.get("trackers", {}))
        trainer.tracker.start(name, {**self.config, "lineage": saving.facts}, trainer.run_dir, trainer.num_steps)
        for sentence in saving.messages:
            trainer.tracker.message(sentence)
        self.is_open = True

    def begin(self, evaluates: bool = True) -> None:
        """Claim the checkpoints' directory, and restore a checkpoint or evaluate the initial weights. Idempotent.

        Args:
            evaluates: False if other weights will be loaded next.
        """
        if self._is_begun:
            return
        self._is_begun = True
        trainer, point = self.trainer, self.trainer.saving.resumed
        trainer.saving.start(trainer.run_dir)
        if point is None:
            if evaluates and trainer.settings.eval_before:
                self._evaluate(0)
            return
        load_parts(point, trainer.parts, ["rng"])  # everything else was loaded when the trainer was built
        if trainer.settings.repeat_first_batch:
            trainer.sampler.rewind()
        if point.step >= trainer.num_steps:
            trainer.tracker.message(
                f"Nothing is left to do: the checkpoint is of step {point.step}, and the run has {trainer.num_steps}."
            )

    def run(self, stop: StopRequest) -> None:
        """Run steps until the end of the run or a stop request."""
        self.begin()
        while self.result.steps < self.trainer.num_steps:
            if self.step(stop):
                return

    def step(self, stop: StopRequest | None = None) -> bool:
        """Run one step, with logging, evaluation and saving when due; returns whether the run must stop."""
        self.begin()
        trainer, result, settings = self.trainer, self.result, self.trainer.settings
        step = result.steps + 1
        started = time.perf_counter()
        if self._rows is None or not settings.repeat_first_batch:
            self._rows = trainer.sampler.next_batch()
        with self.profiler.step(step):
            metrics = trainer.step(trainer.train_data.collate(self._rows), step)
            took = time.perf_counter() - started
        metrics |= {
            **trainer.guards.monitor.take(),
            **trainer.stages.take(),
            "timing/step_s": took,
            "perf/samples_per_s": metrics["perf/samples"] / took,
            "perf/peak_memory_mib": max(peak_memory().values()) / 2**20,
        }
        trainer.tracker.log(metrics, step)
        result.steps, result.last_metrics = step, metrics
        result.samples += int(metrics["perf/samples"])
        result.train_s += took
        is_last = step == trainer.num_steps
        if not self._is_prepared and not is_last and trainer.saving.is_async:  # the optimizer state exists now
            trainer.saving.prepare(*trainer.state(without=("drawn_ahead",)))  # which would wait for the engine
        self._is_prepared = True
        evaluated = self._evaluate(step) if trainer.evaluates_after(step) else {}
        if (sentence := trainer.saving.note(step, metrics)) is not None:
            trainer.tracker.message(sentence)
        reason = None
        if step == settings.stop_after and not is_last:
            reason = "trainer.stop_after"
        elif not is_last and trainer.saving.out_of_time():
            reason = "another one might not end within the time limit"
        is_stopping = bool(stop) or reason is not None
        self._save_if_due({**metrics, **evaluated}, took, is_last, is_stopping)
        if reason is not None:
            trainer.tracker.message(f"Stopping after step {step}: {reason}.")
        return is_stopping

    def save(self, tag: str | None = None, directory: Path | None = None) -> Path:
        """Save now, and wait until the checkpoint is published.

        Args:
            directory: of checkpoints, if not the run's own.
        Returns:
            The checkpoint.
        Raises:
            CheckpointError: it could not be saved.
        """
        self.begin()
        self.settle()
        trainer, saving = self.trainer, self.trainer.saving
        is_own = directory is None or directory.absolute() == saving.directory
        with trainer.stages.stage("save") as note:
            roles, state, facts = self._to_save(self.result.last_metrics)
            facts |= {"metrics": self.result.last_metrics, "tag": tag, "why": "asked for"}
            note.say(f"step {self.result.steps}, asked for")
            if not is_own or not saving.is_on:
                return saving.save_aside(directory or saving.directory, self.result.steps, roles, state, **facts)
            saving.save(self.result.steps, roles, state, **facts)
            outcomes = saving.drain()
        trainer.stages.take()
        self._log_saves(outcomes, is_end=True)
        return saving.directory / self.result.checkpoints[-1]

    def settle(self) -> None:
        """Wait for pending saves and record their outcomes."""
        self._log_saves(self.trainer.saving.drain(), is_end=False)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights on the held-out rows; logs and returns metrics."""
        self.begin()
        return self._evaluate(self.result.steps)

    def go_on_from(self, point: ResumePoint) -> None:
        """Continue from the step of a checkpoint."""
        self.trainer.saving.go_on_from(point)
        before, self.result = self.result, _result_so_far(self.trainer)
        self.result.checkpoints, self._rows = before.checkpoints, None
        self._started = time.perf_counter()

    def failed(self, error: BaseException, *, may_restart: bool = False) -> None:
        """Record the error that ends the run; its traceback is written to run.log, and the error is raised by the
        caller."""
        result = self.result
        if isinstance(error, KeyboardInterrupt):
            result.status = "interrupted"
            self.trainer.tracker.message(f"Interrupted after step {result.steps}.")
        elif isinstance(error, Exception):
            result.error = redact(error_text(error))
            if isinstance(error, WorkerError):
                self.trainer.saving.workers_lost(result.error)
            if may_restart and isinstance(error, WorkerDied):
                result.status = "restarting"
            extra = {"console": False}  # printed by the console tracker at the end of the run
            what = "is restarting" if result.status == "restarting" else "has failed"
            _log.error("The run %s after step %d.", what, result.steps, exc_info=True, extra=extra)
            setattr(error, IN_RUN_LOG, True)

    def end(self) -> None:
        """Write weights and summary, and close trackers and checkpoints, each even if an earlier one fails.
        Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        trainer, result = self.trainer, self.result
        result.wall_s += time.perf_counter() - self._started
        saved = result.checkpoints
        last = {"last_checkpoint": str(Path(trainer.saving.directory) / saved[-1])} if saved else {}
        with ExitStack() as ending:
            ending.callback(lambda: trainer.tracker.close(result.status))
            ending.callback(lambda: trainer.tracker.result(result.as_plain() | last))
            ending.callback(lambda: trainer.saving.close(result.status, result.steps))
            ending.callback(self._write_result)
            ending.callback(self._save_final)
            ending.callback(self.profiler.close)

    def _evaluate(self, step: int) -> dict[str, float]:
        trainer = self.trainer
        if trainer.eval_data is None:
            return {}
        with trainer.stages.stage("eval") as note:
            metrics = trainer.evaluate(step)
            note.say(f"the weights after {step} steps")
        if metrics:
            self.result.evaluations[step] = metrics
            trainer.tracker.evaluation(metrics, step)
        trainer.stages.take()
        return metrics

    def _save_if_due(self, metrics: dict[str, float], took_s: float, is_last: bool, is_stopping: bool) -> None:
        """Save a checkpoint if one is due, and record the outcomes of earlier saves."""
        saving, step = self.trainer.saving, self.result.steps
        why = saving.due(step, took_s, is_last, is_stopping)
        if saving.is_better(metrics) and why is None:
            why = "the best so far"
        is_requested, tag = saving.asked_for()
        if is_requested:
            why = "somebody asked for it"
        if why is not None:
            with self.trainer.stages.stage("save") as note:
                roles, state, facts = self._to_save(metrics)
                saving.save(step, roles, state, metrics=metrics, tag=tag, why=why, **facts)
                note.say(f"step {step}, {why}")
            self.trainer.stages.take()
        is_end = is_last or is_stopping
        self._log_saves(saving.drain() if is_end else saving.poll(), is_end)

    def _to_save(self, metrics: dict[str, float]) -> tuple[dict[str, SavedRoleState], PartStates, dict[str, Any]]:
        """State of the roles, of the driver's parts, and metadata for a checkpoint."""
        roles, state = self.trainer.state()
        trackers = self.trainer.tracker.identity()
        return roles, state, {"learning_rate": rate_of(metrics), "progress": self._progress(), "trackers": trackers}

    def _progress(self) -> dict[str, Any]:
        counts = {name: getattr(self.result, name) for name in ("samples", "train_s", "evaluations")}
        return counts | {"has_chats": getattr(self.trainer.train_data, "has_chats", None)}

    def _log_saves(self, outcomes: list[SaveOutcome], is_end: bool) -> None:
        """Log the outcomes of saves. A failed save does not end the training, unless it was the last one of the run."""
        result, tracker = self.result, self.trainer.tracker
        for outcome in outcomes:
            if isinstance(outcome.error, CheckpointFenced):  # further work of this run would be lost
                raise outcome.error
            if outcome.error is not None:
                _log.error("The checkpoint of step %d was NOT SAVED: %s", outcome.step, outcome.error)
                tracker.message(f"The checkpoint of step {outcome.step} was not saved: {outcome.error}")
                if is_end:
                    raise outcome.error
            elif outcome.name is not None:
                result.checkpoints.append(outcome.name)
                cost = {"stall_s": outcome.stall_s, "total_s": outcome.total_s, "bytes": outcome.num_bytes}
                result.saves.append({"step": outcome.step, **cost})
                _log.info("checkpoint %s is published, %.2f s after it began", outcome.name, outcome.total_s)

    def _write_result(self) -> None:
        file = self.result.run_dir / "summary.json"
        try:
            write_whole(file, (json.dumps(self.result.as_plain(), indent=2) + "\n").encode())
        except OSError as error:  # a full disk must not fail a run whose weights are saved
            _log.error("%s cannot be written: %s", file, error)

    def _save_final(self) -> None:
        """Write the weights of a run that ended well, with the configuration that trained them, for `verl eval`."""
        trainer, result = self.trainer, self.result
        if result.status in ("failed", "restarting") or not result.steps or not trainer.settings.save_final:
            return
        status, result.status = result.status, "failed"  # unless the weights are written
        with trainer.stages.stage("save") as note:
            with _whole_or_nothing(trainer.run_dir):
                result.saved = trainer.save(trainer.run_dir)
                reward = trainer.parts["reward"].state_dict() if "reward" in trainer.parts else {}
                record = {"step": result.steps, "config": as_plain(trainer.description), **reward}
                record["progress"] = self._progress()
                policy = json.dumps(plain(redact_tree(record)), indent=1).encode()
                write_whole(trainer.run_dir / POLICY_RECORD, policy)
            note.say(", ".join(str(path) for path in result.saved))
        result.status = status


@contextmanager
def _whole_or_nothing(run_dir: Path) -> Iterator[None]:
    """Remove a directory of weights if writing it fails.

    Raises:
        CheckpointWriteFailed: the file system refused.
    """
    there = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    try:
        with write_errors(
            f"writing the final weights to {run_dir}", "The last checkpoint holds them, if one was saved"
        ):
            try:
                yield
            except Exception as error:  # safetensors and torch raise their own for those of the file system
                number = re.search(r"os error (\d+)", str(error), re.IGNORECASE)
                if isinstance(error, (OSError, VerlError)) or number is None:
                    raise
                raise OSError(int(number[1]), str(error)) from error
    except BaseException:
        for path in run_dir.iterdir() if run_dir.is_dir() else ():
            if path.name in ("actor", "critic", "reward_model") and path.name not in there:
                shutil.rmtree(path, ignore_errors=True)
        raise
