"""Train state in a checkpoint: the roles' weights and optimizers, the models that are only read, and what the driver
holds (`driver_state`), as checkpoint components.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoint.config import Checkpointing
from verl.checkpoint.save.buffer_layout import SavedComponent
from verl.checkpoint.save.save_request import ExistingFile
from verl.models.hf_state_dict import ADAPTER_BIN, as_torch_file
from verl.trainer.state.driver_state import CheckpointDraft, PartStates, json_bytes, place_of
from verl.trainer.state.training_identity import content_of
from verl.workers.load_state import RoleState, SavedRoleState

OPTIMIZER_FILE = "optim_state_rank_0.safetensors"
IDENTITY = "identity.json"


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
            place_of(name).write(part, draft)
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
        names = [file for file in names if file != IDENTITY]
        if self._is_published:
            return [ExistingFile(path=f"{name}/{file}") for file in names]
        return [ExistingFile(path=f"{name}/{file}", source=directory / file) for file in names]


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
