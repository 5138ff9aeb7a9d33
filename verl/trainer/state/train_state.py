"""Train state in a checkpoint: the roles' weights and optimizers, the models that are only read, and what the driver
holds (`driver_state`), as checkpoint components.

In a distributed save every process of a role writes its own part, and the driver commits.

check   at the start: does every process see the checkpoints' directory, and which processes share a machine?
save    staging opened ── order ──> every process     the driver's own writer waits for their reports, and publishes
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.checkpoint.commit.store import CheckpointStore, SaveTransaction
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.filesystem import FileSystem, remove_tree, write_errors
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_request import (
    ExistingFile,
    MultiWriterSave,
    SaveOutcome,
    SaveRequest,
    open_report_directory,
    submit_failure,
)
from verl.checkpoint.save.snapshot import SavedComponent
from verl.checkpoint.save.writer_process import START_TIMEOUT_S
from verl.errors import CheckpointError, CheckpointWriteFailed
from verl.models.hf_state_dict import ADAPTER_BIN, as_torch_file
from verl.trainer.state.driver_state import CheckpointDraft, PartStates, json_bytes, place_of
from verl.trainer.state.training_identity import content_of
from verl.workers.load_state import RemoteRoleState, RoleState, SavedRoleState
from verl.workers.rank_checkpoint import RankInfo, RankSaveSettings

OPTIMIZER_FILE = "optim_state_rank_0.safetensors"
IDENTITY = "identity.json"
FILES_OF_A_PART = 4  # about; for the check of free inodes
LOST_GRACE_S = 10.0  # what a lost worker copied before, its writer still writes
LATE_FACTOR = 2.5  # times the time in which a worker replaces a hanging writer twice

_log = logging.getLogger(__name__)


class TrainState:
    """Makes the components of each checkpoint of a run.

    Args:
        config: of the run, without secrets.
        uses: fields that the algorithm needs and a frozen model gives, such as `ref_log_probs`.
    """

    def __init__(self, settings: Checkpointing, config: Mapping[str, Any], uses: Collection[str]):
        self.settings, self._frozen = settings, _frozen_models(config, uses)
        self._digests: dict[str, dict[str, Any]] = {}
        self._is_published = False

    def checkpoint(self) -> None:
        """A checkpoint of this run is there: what never changes is linked to it from here on."""
        self._is_published = True

    def of(
        self, roles: Mapping[str, SavedRoleState], state: PartStates
    ) -> tuple[dict[str, SavedComponent], list[ExistingFile]]:
        """Components by directory, and files that are there already.

        Args:
            roles: by name; for roles whose processes write their own tensors only the description.
            state: of the driver's parts, see `verl.trainer.state.driver_state`.
        """
        here = {name: role for name, role in roles.items() if isinstance(role, RoleState)}
        draft = CheckpointDraft({name: self._weights(role) for name, role in here.items()})
        for name, model in self._frozen.items():
            if name not in self._digests:
                self._digests[name] = {"model": model, "content": content_of(model)}
            draft.components[name] = SavedComponent(files={IDENTITY: json_bytes(self._digests[name])})
            draft.existing_files.extend(self._frozen_files(name, model))
        moments = {f"{name}.{key}": x for name, role in here.items() for key, x in role.optimizer.items()}
        draft.components["optimizer"] = SavedComponent(tensors=moments, file=OPTIMIZER_FILE)
        draft.schedule["updates"] = {name: role.updates for name, role in roles.items()}
        for name, part in state.items():
            place_of(name).write(name, part, draft)
        draft.components["scheduler"] = SavedComponent(files={"state.json": json_bytes(draft.schedule)})
        return draft.components, draft.existing_files

    def _weights(self, role: RoleState) -> SavedComponent:
        form = role.model
        if not self.settings.use_safetensors:
            name = ADAPTER_BIN if form.file else "pytorch_model.bin"
            return SavedComponent(
                files={**form.files, name: as_torch_file(form.tensors)}, constant_files=role.tokenizer
            )
        return SavedComponent(
            tensors=form.tensors,
            file=form.file,
            metadata={"format": "pt"},
            files=form.files,
            constant_files={name: data for name, data in role.tokenizer.items() if name not in form.files},
            max_shard_bytes=int(self.settings.max_shard_gib * 2**30),
        )

    def _frozen_files(self, name: str, model: str) -> list[ExistingFile]:
        """Files of the frozen model: copied with the first save, linked to that copy ever after."""
        directory = Path(model)
        if not self.settings.save_frozen or not directory.is_dir():
            return []
        names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        sources = {file: None if self._is_published else directory / file for file in names if file != IDENTITY}
        return [ExistingFile(path=f"{name}/{file}", source=source) for file, source in sources.items()]


def _frozen_models(config: Mapping[str, Any], uses: Collection[str]) -> dict[str, str]:
    """The models that a run reads and never trains: component -> path or name."""
    frozen: dict[str, str] = {}
    if "ref_log_probs" in uses:
        model = (config.get("reference") or {}).get("model") or config["actor"]["model"]
        frozen["reference_model"] = model.get("path") or model.get("_target_")
    reward = config.get("reward") or {}
    described = [part.get("model") for part in _parts_of(reward)]
    models = [model["path"] for model in described if isinstance(model, Mapping)]  # of a remote judge it is a name
    return frozen | {f"reward_model{f'_{i}' if i else ''}": path for i, path in enumerate(models)}


def _parts_of(reward: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A reward, and those that it is made of."""
    yield reward
    for part in [reward.get("reward"), *(reward.get("parts") or {}).values()]:
        if isinstance(part, Mapping):
            yield from _parts_of(part)


@dataclass(frozen=True)
class _RoleProcesses:
    """Processes that hold the same roles."""

    lead: Any  # a handle to one of these roles
    rank_infos: list[RankInfo]
    first_rank: int

    @property
    def names(self) -> list[str]:
        return [f"rank_{self.first_rank + rank}" for rank in range(len(self.rank_infos))]


class RankWriters:
    """The processes of the trained roles, as writers of checkpoints.

    Args:
        trained: component -> handle to the role.
    """

    def __init__(self, trained: Mapping[str, Any], settings: Checkpointing):
        self._trained, self._settings = dict(trained), settings
        self._groups: list[_RoleProcesses] = []
        self._under_way: list[MultiWriterSave] = []
        self._is_copying = False

    def check_shared_directory(self, store: CheckpointStore) -> str | None:
        """Find out which roles share a process.

        Returns:
            Why the processes cannot write into the store, or None.
        """
        nonce = secrets.token_hex(16)
        probe_directory = store.directory / "staging" / f"look-{nonce[:12]}"
        with write_errors("looking whether workers see the checkpoints"):
            store.disk.make_directory(probe_directory)
            try:
                open_report_directory(store.disk, probe_directory, nonce)
                rank_infos = {
                    name: role.check_shared_directory(probe_directory, nonce).result()
                    for name, role in self._trained.items()
                }
            finally:
                remove_tree(store.disk, probe_directory)
        self._groups, first_rank = [], 0
        for name, infos in rank_infos.items():
            if infos[0].roles[0] == name:
                self._groups.append(_RoleProcesses(self._trained[name], infos, first_rank))
                first_rank += len(infos)
        return self._message_if_directory_invisible(
            [info.sees for group in self._groups for info in group.rank_infos], store.directory
        )

    def states(self) -> dict[str, RemoteRoleState]:
        """Description of each role in the trainer state."""
        states = {name: state for group in self._groups for name, state in group.lead.remote_states().result().items()}
        return {name: states[name] for name in self._trained}

    def prepare(self, store: CheckpointStore, is_async: bool) -> None:
        """Have every process allocate the memory for saves in the background."""
        for group in self._groups:
            group.lead.prepare_save(self._setting(store, is_async, group))

    def save(self, writer: CheckpointWriter, request: SaveRequest, num_bytes: int) -> None:
        """Begin a save. What becomes of it, `writer` tells; nothing of it is raised but the loss of a worker.

        Args:
            request: what the driver writes of it.
            num_bytes: that the processes will write.
        """
        began, step, tag = time.perf_counter(), request.step, request.tag
        try:
            transaction, multi_writer, nonce = self._begin(writer.store, step, tag, num_bytes)
        except CheckpointError as error:
            writer.note(SaveOutcome(step=step, tag=tag, error=error))
            return
        try:
            fault = self._order(writer, step, multi_writer, nonce)
            if fault is not None:
                raise CheckpointWriteFailed(fault)
        except BaseException as error:
            transaction.abort()
            if not isinstance(error, CheckpointWriteFailed):
                raise
            writer.note(SaveOutcome(step=step, tag=tag, error=error))
            return
        self._under_way = [*(earlier for earlier in self._under_way if earlier.directory.exists()), multi_writer]
        writer.save(replace(request, multi_writer=multi_writer), transaction, began)

    def wait_copied(self) -> None:
        """Make every process wait until its copy is complete before it handles further calls."""
        if self._is_copying:
            self._is_copying = False
            for group in self._groups:
                group.lead.wait_copied()

    def give_up(self, reason: str) -> None:
        """Let saves end whose processes are gone."""
        end = time.monotonic() + LOST_GRACE_S
        while time.monotonic() < end and any(multi_writer.directory.exists() for multi_writer in self._under_way):
            time.sleep(0.05)
        for multi_writer in self._under_way:
            for name in multi_writer.others:
                submit_failure(FileSystem(), multi_writer.directory, name, reason)

    def _begin(
        self, store: CheckpointStore, step: int, tag: str | None, num_bytes: int
    ) -> tuple[SaveTransaction, MultiWriterSave, str]:
        others, nonce = [name for group in self._groups for name in group.names], secrets.token_hex(16)
        transaction = store.begin(step, tag, num_bytes, FILES_OF_A_PART * len(others), others)
        try:
            open_report_directory(store.disk, transaction.directory, nonce)
        except BaseException:
            transaction.abort()
            raise
        late_s = LATE_FACTOR * self._settings.writer_timeout_s + START_TIMEOUT_S
        multi_writer = MultiWriterSave(
            directory=transaction.directory, name="main", others=tuple(others), late_s=late_s
        )
        return transaction, multi_writer, nonce

    def _order(self, writer: CheckpointWriter, step: int, multi_writer: MultiWriterSave, nonce: str) -> str | None:
        """Have every process take part. Returns why one cannot."""
        self._is_copying = True
        answers: list[Future[list[bool]]] = []
        for group in self._groups:
            setting = self._setting(writer.store, writer.mode == "async", group)
            answers.append(group.lead.save_part(setting, step, multi_writer.directory, nonce))
        return self._message_if_directory_invisible(
            [sees for answer in answers for sees in answer.result()], writer.store.directory
        )

    def _setting(self, store: CheckpointStore, is_async: bool, group: _RoleProcesses) -> RankSaveSettings:
        store.claim_directory()
        return RankSaveSettings(
            store=store,
            is_async=is_async,
            use_safetensors=self._settings.use_safetensors,
            max_shard_bytes=int(self._settings.max_shard_gib * 2**30),
            first_rank=group.first_rank,
            increment=self._settings.increment,
            writer_timeout_s=self._settings.writer_timeout_s,
        )

    def _message_if_directory_invisible(self, see: Collection[bool], directory: Path) -> str | None:
        """Who of all processes does not see a directory."""
        who = (
            f"{name} ({', '.join(info.roles)}) on {info.host}"
            for group in self._groups
            for name, info in zip(group.names, group.rank_infos, strict=True)
        )
        invisible_to = [process for process, sees in zip(who, see, strict=True) if not sees]
        if not invisible_to:
            return None
        more = f" and {len(invisible_to) - 3} more" if len(invisible_to) > 3 else ""
        return f"{', '.join(invisible_to[:3])}{more} cannot see {directory} as the driver does"
