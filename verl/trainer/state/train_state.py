"""Train state in a checkpoint: roles, data sampler, random generators and reward statistics as checkpoint components.

rng/torch.safetensors          torch, cuda_I (the driver's); rank_R.torch, rank_R.cuda_I
rng/python.json  numpy.json    the driver's
rng/rank_R.json                python and numpy of rank R
scheduler/state.json           reward: statistics of scores; reward_of: what the reward rates by. Another reward begins
                               anew, and that is logged
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from verl.checkpoint.config import Checkpointing
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.resume_point import ResumePoint
from verl.checkpoint.save.save_plan import CopiedFile, LinkedFile, SharedFile
from verl.checkpoint.save.save_request import SavedComponent, TensorItem
from verl.cluster.rpc import WorkerGroup
from verl.component import as_plain
from verl.models.hf_state_dict import ADAPTER_BIN, as_torch_file
from verl.replay.checkpoint_state import COMPONENT as REPLAY_BUFFER
from verl.rewards.base import Reward, RewardDescription
from verl.trainer.state.training_identity import content_of, differences, reward_identity
from verl.utils.seeding import RngState, derive_seed, rng_state, set_rng_state
from verl.workers.load_state import RoleState, SavedRoleState

FILE = "torch.safetensors"
PLAIN = ("python", "numpy")

_log = logging.getLogger(__name__)


def rng_references(num_ranks: int) -> dict[str, str]:
    """Which generator's state lies where, for `trainer_state.json`."""
    own = {"torch": f"rng/{FILE}", **{name: f"rng/{name}.json" for name in PLAIN}}
    return own | {f"rank_{rank}": f"rng/rank_{rank}.json" for rank in range(num_ranks)}


def rng_component(ranks: Sequence[RngState]) -> SavedComponent:
    """The states of this process, and of the ranks of the roles if they are elsewhere."""
    tensors, plain = rng_state()
    files = {f"{name}.json": plain[name] for name in PLAIN}
    for rank, (theirs, values) in enumerate(ranks):
        tensors |= {f"rank_{rank}.{name}": tensor for name, tensor in theirs.items()}
        files[f"rank_{rank}.json"] = values
    items = [TensorItem(name=name, tensor=tensor) for name, tensor in tensors.items()]
    return SavedComponent(tensors=items, file=FILE, files={name: _json(value) for name, value in files.items()})


def ranks_of(cluster: WorkerGroup, role: Any) -> list[RngState]:
    """The states of the processes that hold a role; none where that is the driver's own."""
    return [] if cluster.shares_memory else role.rng_states().result()


def restore_driver(point: ResumePoint) -> None:
    """Let this process draw on from where the checkpoint was made."""
    plain = {name: point.read_json(f"rng/{name}.json") for name in PLAIN}
    with point.understanding("rng"):
        set_rng_state({name: x for name, x in _tensors(point).items() if not name.startswith("rank_")}, plain)


def restore_ranks(point: ResumePoint, cluster: WorkerGroup, role: Any, seed: int) -> None:
    """The same for the processes that hold a role; a rank that the checkpoint knows nothing of is seeded anew."""
    if cluster.shares_memory:
        return
    states = _saved_ranks(point)
    if len(states) != cluster.world_size:
        new = [str(rank) for rank in range(len(states), cluster.world_size)]
        told = f"of rank {', '.join(new)} are seeded anew" if new else "of its further ranks are left out"
        _log.info(
            "The checkpoint has the random generators of %d processes, and this run %d: those %s.",
            len(states), cluster.world_size, told,
        )  # fmt: skip
    role.set_rng_states(states, derive_seed(seed, "resumed", point.step)).result()


def _saved_ranks(point: ResumePoint) -> list[RngState]:
    names = [PurePosixPath(entry.path).name for entry in CheckpointReader(point.published).files("rng")]
    count, tensors = sum(name.startswith("rank_") for name in names), _tensors(point)
    return [(_below(tensors, f"rank_{rank}."), point.read_json(f"rng/rank_{rank}.json")) for rank in range(count)]


def _tensors(point: ResumePoint) -> dict[str, Tensor]:
    return point.read_tensors("rng")


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _json(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()


class RewardStats:
    """Of one reward.

    Args:
        description: of the reward; files and models that it names are hashed once, if it has anything to save.
    """

    def __init__(self, description: RewardDescription):
        self._description = description
        self._known: dict[str, Any] | None = None

    def state(self, reward: Reward) -> dict[str, Any]:
        """For a checkpoint."""
        learned = reward.state_dict()
        return {"reward": learned, "reward_of": self._identity} if learned else {"reward": learned}

    def load(self, reward: Reward, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. One of a version that did not say whose statistics it holds is trusted."""
        learned, found = state["reward"], dict[str, Any]()
        if learned and reward.state_dict() and "reward_of" in state:
            found = differences({"reward": state["reward_of"]}, {"reward": self._identity})
        if found:
            reward.reset_stats()
            _log.warning("The reward is another one (%s): its statistics of scores begin anew.", ", ".join(found))
        else:
            reward.load_state_dict(learned)

    @property
    def _identity(self) -> dict[str, Any]:
        if self._known is None:
            self._known = reward_identity(as_plain(self._description))
        return self._known


OPTIMIZER_FILE = "optim_state_rank_0.safetensors"
IDENTITY = "identity.json"
DRAWN_AHEAD = "drawn_ahead"
APART = ("sampler", "ranks", DRAWN_AHEAD, REPLAY_BUFFER)  # of a state, what is no part of `scheduler/`


class TrainState:
    """Makes the components of each checkpoint of a run.

    Args:
        config: of the run, without secrets.
        uses: fields that the algorithm needs and a frozen model gives, such as `ref_log_probs`.
    """

    def __init__(self, settings: Checkpointing | None, config: Mapping[str, Any], uses: Collection[str]):
        self.settings, self._frozen = settings, _frozen_models(config, uses)
        self._digests: dict[str, dict[str, Any]] = {}
        self._is_published = False

    def published(self) -> None:
        """A checkpoint of this run is there: what never changes is linked to it from here on."""
        self._is_published = True

    def of(
        self, roles: Mapping[str, SavedRoleState], state: Mapping[str, Any]
    ) -> tuple[dict[str, SavedComponent], list[LinkedFile | CopiedFile | SharedFile]]:
        """Components by directory, and files that are there already.

        Args:
            roles: by name; of those whose processes write their tensors themselves, only what is told of them.
            state: plain values; `sampler` goes to `dataloader/`, all others to `scheduler/`; `ranks`, see
                `verl.trainer.state.train_state.ranks_of`; `drawn_ahead`, tensors by name, and `replay_buffer`, a
                `verl.replay.checkpoint_state.ReplayState`, components of their own.
        """
        drawn = state.get(DRAWN_AHEAD)
        here = {name: role for name, role in roles.items() if isinstance(role, RoleState)}
        components = {name: self._weights(role) for name, role in here.items()}
        moments = {f"{name}.{key}": x for name, role in here.items() for key, x in role.optimizer.items()}
        optimizer = [TensorItem(name=name, tensor=tensor) for name, tensor in moments.items()]
        others = {name: value for name, value in state.items() if name not in APART}
        schedule = {"updates": {name: role.updates for name, role in roles.items()}, **others}
        links: list[LinkedFile | CopiedFile | SharedFile] = []
        for name, model in self._frozen.items():
            components[name] = SavedComponent(files={IDENTITY: _json(self._identity_of(name, model))})
            links += self._frozen_files(name, model)
        components |= {
            "optimizer": SavedComponent(tensors=optimizer, file=OPTIMIZER_FILE),
            "scheduler": SavedComponent(files={"state.json": _json(schedule)}),
            "dataloader": SavedComponent(files={"state.json": _json(state["sampler"])}),
            "rng": rng_component(state.get("ranks", ())),
        }
        if drawn:
            rows = [TensorItem(name=name, tensor=tensor) for name, tensor in drawn.items()]
            components[DRAWN_AHEAD] = SavedComponent(tensors=rows, file="rows.safetensors")
        if (buffer := state.get(REPLAY_BUFFER)) is not None:
            components[REPLAY_BUFFER] = SavedComponent(files=buffer.files)
            links += [
                SharedFile(path=f"{REPLAY_BUFFER}/{name}", source=shard.path, leaves=shard.leaves)
                for name, shard in buffer.shared.items()
            ]
        return components, links

    def _weights(self, role: RoleState) -> SavedComponent:
        form = role.model
        if self.settings is not None and not self.settings.use_safetensors:
            name = ADAPTER_BIN if form.file else "pytorch_model.bin"
            return SavedComponent(
                files={**form.files, name: as_torch_file(form.tensors)}, constant_files=role.tokenizer
            )
        assert self.settings is not None
        return SavedComponent(
            tensors=[TensorItem(name=name, tensor=tensor) for name, tensor in form.tensors.items()],
            file=form.file,
            metadata={"format": "pt"},
            files=form.files,
            constant_files={name: data for name, data in role.tokenizer.items() if name not in form.files},
            max_shard_bytes=int(self.settings.max_shard_gib * 2**30),
        )

    def _identity_of(self, name: str, model: str) -> dict[str, Any]:
        if name not in self._digests:
            self._digests[name] = {"model": model, "content": content_of(model)}
        return self._digests[name]

    def _frozen_files(self, name: str, model: str) -> list[LinkedFile | CopiedFile]:
        """Its files: copied with the first save, linked to that copy ever after."""
        directory = Path(model)
        if self.settings is None or not self.settings.save_frozen or not directory.is_dir():
            return []
        names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        names = [file for file in names if file != IDENTITY]
        if self._is_published:
            return [LinkedFile(path=f"{name}/{file}") for file in names]
        return [CopiedFile(path=f"{name}/{file}", source=directory / file) for file in names]


def _frozen_models(config: Mapping[str, Any], uses: Collection[str]) -> dict[str, str]:
    """The models that a run reads and never trains: component -> path or name."""
    found: dict[str, str] = {}
    if "ref_log_probs" in uses:
        model = (config.get("reference") or {}).get("model") or config["actor"]["model"]
        found["reference_model"] = model.get("path", model.get("_target_"))
    reward = config.get("reward") or {}
    described = [part.get("model") for part in _parts_of(reward)]
    models = [model["path"] for model in described if isinstance(model, Mapping)]  # of a remote judge it is a name
    return found | {f"reward_model{f'_{i}' if i else ''}": path for i, path in enumerate(models)}


def _parts_of(reward: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A reward, and those that it is made of."""
    yield reward
    for part in [reward.get("reward"), *(reward.get("parts") or {}).values()]:
        if isinstance(part, Mapping):
            yield from _parts_of(part)
