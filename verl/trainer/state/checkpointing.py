"""Checkpointing during training: when a save is due, its content, its outcome, and its upload.

after each step:  due? ──> state of roles, sampler, generators ──> CheckpointWriter ──> committed, pruned ──> uploaded
before an update: the copy that is being made must be done
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.commit.upload_state import write_upload_target
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.checkpoint import loss_points
from verl.checkpoint.ownership import Owner, RunLock
from verl.checkpoint.read.discovery import RESERVED
from verl.checkpoint.remote.upload_process import Uploader, UploadEvent, UploadSettings
from verl.checkpoint.resolve import SAVED, ResumePoint, RunCheckpoints
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_request import SaveOutcome, SaveRequest
from verl.component import hint, nearest
from verl.errors import CheckpointError, CheckpointFenced
from verl.ops.cpu_matmul import active_library
from verl.storage.config import Storage
from verl.trainer.state.driver_state import RNG, PartStates
from verl.trainer.state.lineage import Lineage, ParentCheckpoint, code_version, parent_of
from verl.trainer.state.save_directory import SaveDirectory, ancestors_of
from verl.trainer.state.train_state import RankWriters, TrainState
from verl.trainer.state.training_identity import sources_of
from verl.utils.external_input import NAME, write_whole
from verl.utils.redact import redact_tree
from verl.workers.load_state import RemoteRoleState, SavedRoleState

ASKED = "save"  # a file of this name in the run's directory asks for a checkpoint; it may hold a tag
HISTORY = 200  # last values of the loss that a checkpoint keeps
JUMP_STEPS, JUMP_FACTOR = 5, 4.0
RATES = ("actor/lr", "sft/lr", "preference/lr")
OF_RATES = re.compile(r"trainer\.total_|(actor|critic)\.optimizer\.")  # settings of a learning rate

_log = logging.getLogger(__name__)


def rate_of(metrics: Mapping[str, float]) -> float | None:
    """The learning rate of the policy in the metrics of a step."""
    return next((metrics[key] for key in RATES if key in metrics), None)


def new_run_id() -> str:
    return secrets.token_hex(4)


class CheckpointSaver:
    """The checkpoints of one run.

    Args:
        settings: None: no checkpoints are saved.
        place: the directory of the checkpoints, its object storage, and the checkpoint that the run resumes from.
        config: of the run, as plain values.
        identity: see `verl.trainer.state.training_identity`; may be empty if nothing is saved.
        loss_key: the metric of the loss curve.
        uses: fields of frozen models that the algorithm needs, such as `ref_log_probs`.
    Attributes:
        run_id: of this run; a resumed run has a new one.
        resumed: the checkpoint that the run resumes from, or None.
        messages: information about the directory for the user, one sentence each.
        ancestors: see `verl.trainer.state.save_directory.ancestors_of`.
        rank_writers: set if the processes of the roles write their own parts; None if the driver writes
            everything.
    """

    rank_writers: RankWriters | None = None

    def __init__(
        self,
        settings: Checkpointing | None,
        place: SaveDirectory,
        config: Mapping[str, Any],
        identity: Mapping[str, Any],
        loss_key: str,
        uses: Collection[str] = (),
        run_id: str | None = None,
    ):
        self.is_wanted, self.settings = settings is not None, settings or Checkpointing()
        self.directory, self.loss_key, self.uses = place.directory, loss_key, uses
        self.run_id, self.messages, self._place = run_id or new_run_id(), list[str](), place
        self._config, self.identity = redact_tree(dict(config)), dict(identity)
        self._num_threads = torch.get_num_threads()  # now: a sampler takes half of them while the run trains
        self._longest_step_s = 0.0
        self._tier = place.tier
        self._uploader: Uploader | None = None
        self._num_waiting = 0  # checkpoints that were not yet uploaded at the last report
        self._writer: CheckpointWriter | None = None
        self._contents = TrainState(self.settings, self._config, uses)
        self.lineage = Lineage(place.directory, self.run_id)
        self.go_on_from(place.resumed)

    def go_on_from(self, point: ResumePoint | None) -> None:
        """Restore the loss curve and times from a checkpoint; None for a new run."""
        self.resumed, self.ancestors = point, ancestors_of(point)
        self.parent: ParentCheckpoint | None = None if point is None else parent_of(point, self._config)
        past = {} if point is None else point.state
        points = [(step, loss) for step, loss in loss_points(past) if math.isfinite(loss)]
        self._history: deque[tuple[int, float]] = deque(points, maxlen=HISTORY)
        self.losses_before = [loss for _, loss in self._history]
        self._wall_before = float(past.get("wall_clock_s", 0.0))
        self._best = past.get("best")
        self._looked_for: set[str] = set()  # settings whose metric was looked for
        self._started = self._last_save = time.monotonic()
        self._saved_step: int | None = None if point is None else point.step

    def reconfigured(self, config: Mapping[str, Any]) -> None:
        """Record a component that was replaced during the run in later checkpoints."""
        self._config = redact_tree(dict(config))
        self._contents = TrainState(self.settings, self._config, self.uses)
        self.__dict__.pop("_sources", None)

    @cached_property
    def _sources(self) -> dict[str, Any]:
        return sources_of(self._config)

    @cached_property
    def code(self) -> dict[str, Any]:
        return code_version()

    @property
    def facts(self) -> dict[str, Any]:
        """Origin of this run, for trackers."""
        return {"run_id": self.run_id, "parent": self.parent and asdict(self.parent), "ancestors": self.ancestors}

    @property
    def storage(self) -> Storage | None:
        return None if self._tier is None else self._tier.storage

    def start(self, run_dir: Path) -> None:
        """Claim the directory and record the run.

        Raises:
            CheckpointWriteFailed: the directory cannot be written.
        """
        if not self.is_wanted:
            return
        store = CheckpointStore(self.directory, self.run_id)
        store.claim_directory()
        retention = replace(self.settings.retention, lineage={**self.ancestors, self.run_id: sys.maxsize})
        self._writer = CheckpointWriter(
            store,
            mode="async" if self.settings.save_async else "sync",
            retention=retention,
            timeout_s=self.settings.writer_timeout_s,
        )
        self._run_dir = run_dir
        relative = os.path.relpath(self.directory, run_dir.absolute())
        directory = str(self.directory)
        record = RunCheckpoints(save_dir=directory, relative=relative, run_id=self.run_id, ancestors=self.ancestors)
        write_whole(run_dir / SAVED, json.dumps(asdict(record), indent=2).encode() + b"\n")  # others may read it
        if self.rank_writers is not None and (fault := self.rank_writers.check_shared_directory(store)) is not None:
            later = "is refused" if self._tier is None else f"fetches it from {self._tier.address}"
            _log.warning(
                "%s: the driver gathers and writes every checkpoint, and a resume or restart on a machine without it "
                "%s. Put checkpoint.save_dir where all machines see it; then every process writes its part.",
                fault, later,
            )  # fmt: skip
            self.rank_writers = None
        self.lineage.add("run", **self.facts, run_dir=str(run_dir), code=self.code, identity=self.identity)
        upload_target = None if self._tier is None else self._tier.cold()
        write_upload_target(store.disk, self.directory, upload_target)
        if self._tier is not None and upload_target is not None:
            setting = UploadSettings(
                directory=str(self.directory),
                storage=self._tier.storage,
                claim=f"{self.run_id}-{secrets.token_hex(4)}",
                cold=upload_target,
            )
            self._uploader = Uploader(setting)

    def due(self, step: int, took_s: float, is_last: bool, is_stopping: bool) -> str | None:
        """Why a checkpoint is to be saved after this step, or None."""
        self._longest_step_s = max(self._longest_step_s, took_s)
        if not self.is_wanted or step == self._saved_step:
            return None
        if is_last:
            return "the last step"
        if is_stopping:
            return "the run is ending"
        every, every_s = self.settings.save_interval, self.settings.save_interval_s
        if every and step % every == 0:
            return f"every {every} steps"
        return f"every {every_s:g} s" if every_s and time.monotonic() - self._last_save >= every_s else None

    def asked_for(self) -> tuple[bool, str | None]:
        """Whether the user has created a file `save` in the run's directory, which is removed, and the tag in it. An
        invalid tag is reported and not used."""
        if self._writer is None:
            return False, None
        file, taken = self._run_dir / ASKED, self._run_dir / f".{ASKED}.taken"
        try:
            file.replace(taken)  # a file that is created from here on asks once more
            tag = taken.read_text("utf-8", "replace").strip()
        except FileNotFoundError:
            return False, None
        except OSError as error:
            _log.warning("%s asks for a checkpoint, and its tag cannot be read: %s", file, error)
            tag = ""
        taken.unlink(missing_ok=True)
        if not tag or (NAME.fullmatch(tag) and not tag.startswith("global_step_") and tag not in RESERVED):
            return True, tag or None
        _log.warning("%s asks for the tag %r: it names a directory; use letters, digits and . _ = + -", file, tag[:80])
        return True, None

    def is_better(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is the best so far in the metric that `save_best` names."""
        self._tell_unknown(metrics)
        name = self.settings.save_best
        value = None if name is None else metrics.get(name)
        if value is None or not math.isfinite(value):
            return False
        sign = 1 if self.settings.best_mode == "max" else -1
        if self._best is not None and sign * value <= sign * self._best:
            return False
        self._best = value
        return True

    def _tell_unknown(self, metrics: Mapping[str, float]) -> None:
        """Tell once of a metric that the settings name and that does not come: after the first evaluation, or after
        the first step if it is none of evaluations."""
        has_evaluated = any(key.startswith("eval/") for key in metrics)
        for name in ("keep_best", "save_best"):
            key = getattr(self.settings, name)
            if key is None or name in self._looked_for or not (has_evaluated or not key.startswith("eval/")):
                continue
            self._looked_for.add(name)
            if key not in metrics:
                known = hint(nearest(key, metrics))
                _log.warning("checkpoint.%s is %r: there is no such metric, so it has no effect.%s", name, key, known)

    def out_of_time(self) -> bool:
        """Whether the next step might exceed the time limit."""
        if self.settings.time_limit_s is None:
            return False
        left = self.settings.time_limit_s - (time.monotonic() - self._started)
        return left < self.settings.time_margin_s + 1.5 * self._longest_step_s

    def note(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Add a step to the loss curve, unless its loss is not finite; returns a message if after a resume the first
        losses jump, or the learning rate is that of another schedule."""
        if (loss := metrics.get(self.loss_key)) is not None and math.isfinite(loss):
            self._history.append((step, float(loss)))
        if self.resumed is not None and step == self.resumed.step + 1:
            return self._other_rate(metrics)
        if self.resumed is None or step != self.resumed.step + JUMP_STEPS:
            return None
        return self._jump([value for at, value in self._history if at > self.resumed.step])

    def save(self, step: int, roles: Mapping[str, SavedRoleState], state: PartStates, **facts: Any) -> None:
        """Begin a save; its outcome is reported by `poll`.

        Args:
            roles: by name.
            state: of the driver's parts, see `verl.trainer.state.driver_state`.
            facts: `tag`, `metrics`, and further entries of `trainer_state.json`.
        """
        if self._writer is None:
            return
        self._saved_step, self._last_save = step, time.monotonic()
        if (lock := self._place.lock) is not None and lock.was_removed:  # and with it what files are linked to
            self._contents = TrainState(self.settings, self._config, self.uses)
            try:
                if (holder := lock.acquire()) is not None:
                    raise CheckpointFenced(
                        f"the lock of {self.directory} was removed, and another run saves there now ({holder})"
                    )
            except CheckpointError as error:
                self._writer.note(SaveOutcome(step=step, tag=facts.get("tag"), error=error))
                return
        self._save(self._writer, self._request(self._contents, step, roles, state, facts), roles)

    def save_aside(
        self, directory: Path, step: int, roles: Mapping[str, SavedRoleState], state: PartStates, **facts: Any
    ) -> Path:
        """Save once in another directory, without retention; see `save`. Returns the checkpoint.

        Raises:
            CheckpointError: it could not be saved, or another running process saves in that directory.
        """
        lock = RunLock(directory.absolute(), Owner.here(self.run_id, self.identity), "a directory for checkpoints")
        if RunLock.held_here(directory) is None and (holder := lock.acquire()) is not None:
            raise CheckpointFenced(f"{directory} is where another run saves ({holder}): give another directory")
        try:
            store = CheckpointStore(directory.absolute(), self.run_id)
            store.claim_directory()
            with CheckpointWriter(store, mode="sync") as writer:
                contents = TrainState(self.settings, self._config, self.uses)
                self._save(writer, self._request(contents, step, roles, state, facts), roles)
                (outcome,) = writer.drain()
        finally:
            lock.release()
        assert outcome.directory is not None, "a save that failed raises"
        return outcome.directory

    def states_of(self, trained: Mapping[str, Any], shares_memory: bool) -> dict[str, SavedRoleState]:
        """State of the roles for a save, or only its description if their processes write it themselves.

        Args:
            trained: component -> handle to the role.
            shares_memory: the driver sees the roles' own tensors.
        """
        if self.rank_writers is not None and self.is_on:
            return dict(self.rank_writers.states())
        return {name: role.state(not shares_memory).result() for name, role in trained.items()}

    def workers_lost(self, reason: str) -> None:
        if self.rank_writers is not None:
            self.rank_writers.give_up(reason)

    def _save(self, writer: CheckpointWriter, request: SaveRequest, roles: Mapping[str, SavedRoleState]) -> None:
        remote = [role.num_bytes for role in roles.values() if isinstance(role, RemoteRoleState)]
        if not remote:
            writer.save(request)
            return
        assert self.rank_writers is not None
        self.rank_writers.save(writer, request, sum(remote))

    def _request(
        self,
        contents: TrainState,
        step: int,
        roles: Mapping[str, SavedRoleState],
        state: PartStates,
        facts: dict[str, Any],
    ) -> SaveRequest:
        metrics = {k: v for k, v in facts.pop("metrics", {}).items() if isinstance(v, (int, float))}
        components, existing_files = contents.of(roles, state)
        return SaveRequest(
            step=step,
            tag=facts.pop("tag", None),
            components=components,
            existing_files=existing_files,
            state=self._state(state, facts),
            metrics=metrics,
            increment=self.settings.increment,
        )

    @property
    def is_on(self) -> bool:
        """Whether the run saves checkpoints, from its start to its end."""
        return self._writer is not None

    @property
    def is_busy(self) -> bool:
        return self._writer is not None and self._writer.num_under_way > 0

    @property
    def is_async(self) -> bool:
        return self._writer is not None and self._writer.mode == "async"

    def prepare(self, roles: Mapping[str, SavedRoleState], state: PartStates) -> None:
        """Allocate host buffers for saves of this size in the background, so that the first save is not slower."""
        assert self._writer is not None
        if self.rank_writers is not None:
            self.rank_writers.prepare(self._writer.store, self.is_async)
        self._writer.prepare(SaveRequest(step=0, components=self._contents.of(roles, state)[0]))

    def wait_copied(self) -> None:
        """Wait until weights and optimizer state may change again."""
        if self._writer is not None:
            self._writer.wait_copied()
        if self.rank_writers is not None:
            self.rank_writers.wait_copied()

    def poll(self) -> list[SaveOutcome]:
        """Outcomes of saves since the last call, including failed ones with their errors."""
        return self._record_outcomes([] if self._writer is None else self._writer.poll(raises=False))

    def drain(self) -> list[SaveOutcome]:
        """Wait for all pending saves; see `poll`."""
        return self._record_outcomes([] if self._writer is None else self._writer.drain(raises=False))

    def close(self, status: str | None = None, step: int = 0) -> None:
        """Finish pending saves and stop the writer. Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._close_uploader(waits=status is not None)
            if status is not None:
                self.lineage.add("end", status=status, step=step)
        self._place.release()

    def _record_outcomes(self, outcomes: list[SaveOutcome]) -> list[SaveOutcome]:
        for outcome in outcomes:
            if outcome.name is not None:
                self._contents.checkpoint()
                self.lineage.add("checkpoint", checkpoint=outcome.name, step=outcome.step, pruned=list(outcome.pruned))
        if self._uploader is not None:
            self._record_uploads(self._uploader.heard())
        return outcomes

    def _close_uploader(self, waits: bool) -> None:
        """Wait for uploads, up to the maximum, and end the process; the next start of the run uploads the rest."""
        if self._uploader is None or self._tier is None:
            return
        uploader, wait_s, address = self._uploader, self.settings.upload_wait_s, self._tier.address
        if waits and not uploader.is_fenced:
            _log.info("waiting up to %g s for uploads to %s", wait_s, address)
        self._record_uploads(uploader.close(wait_s if waits else 0.0))
        if waits and not uploader.is_done:
            left = f"{self._num_waiting} wait" if self._num_waiting else "the last ones are"
            _log.error(
                "NOT ALL checkpoints are in %s: %s on the local disk, and the next start of this run continues "
                "uploading", address, left,
            )  # fmt: skip
        self._uploader = None

    def _record_uploads(self, events: list[UploadEvent]) -> None:
        address = "" if self._tier is None else self._tier.address
        for event in events:
            self._num_waiting = event.waiting
            if event.kind == "uploaded":
                _log.info("%s is in %s: %.1f MiB, %.1f s", event.name, address, event.sent_bytes / 2**20, event.took_s)
                self.lineage.add("uploaded", checkpoint=event.name, address=address)
            elif event.kind == "fenced":
                _log.error("UPLOADS HAVE STOPPED: %s. Training continues, and saves to the local disk.", event.error)
            elif event.kind == "failed":
                _log.error(
                    "%s is NOT in %s: %s. Training continues; %d wait on the local disk.",
                    event.name or "a checkpoint", address, event.error, event.waiting,
                )  # fmt: skip

    def _state(self, state: PartStates, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **facts,
            "epoch": state["sampler"].get("epoch"),
            "loss_history": [list(entry) for entry in self._history],
            "best": self._best,
            "wall_clock_s": round(self._wall_before + time.monotonic() - self._started, 3),
            "rng_states": RNG.references(len(state["rng"]["ranks"])),
            "lineage": self.facts,
            "code": self.code,
            "identity": self.identity,
            "config": self._config,
            "sources": self._sources,
            "num_threads": self._num_threads,
            "cpu_matmul": active_library(),
        }

    def _other_rate(self, metrics: Mapping[str, float]) -> str | None:
        """The learning rate before and after a resume under another schedule."""
        changed = [] if self.parent is None else [path for path in self.parent.differences if OF_RATES.search(path)]
        before, now = self.resumed and self.resumed.state.get("learning_rate"), rate_of(metrics)
        if not changed or before is None or now is None:
            return None
        return f"The learning rate was {before:.3g} before the resume and is {now:.3g} now, by {', '.join(changed)}."

    def _jump(self, first: list[float]) -> str | None:
        """Compare the first losses after a resume with the curve before it."""
        before = self.losses_before[-50:]
        if len(before) < 10 or not first:
            return None
        values = torch.tensor(before, dtype=torch.float64)
        mean, spread, now = float(values.mean()), float(values.std()), sum(first) / len(first)
        if abs(now - mean) <= JUMP_FACTOR * spread + 1e-6 * abs(mean):
            return None
        verified = " and verified" if self.settings.verify else ""
        changed = ", ".join(sorted(self.parent.differences)) if self.parent is not None else ""
        return (
            f"{self.loss_key} was {mean:.4g} +- {spread:.2g} before the resume and is {now:.4g} in the first "
            f"{len(first)} steps after it. Weights, optimizer, schedule, data order and random generators were "
            f"restored{verified}; what differs is the configuration: {changed or 'nothing'}."
        )
