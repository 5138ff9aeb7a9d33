"""State of the driver as a dictionary of parts, each with `state_dict` and `load_state_dict`.

part                  where a checkpoint has it                  loaded with the component
sampler               dataloader/state.json                      dataloader
drawn_ahead           drawn_ahead/rows.safetensors               dataloader
reference_scores      reference_scores/scores.safetensors        scheduler
kl, safety            scheduler/state.json, under that name      scheduler
advantage             the same, if the estimator keeps state     scheduler
policy_loss           the same, with the state of each process   scheduler
value_loss            the same                                   scheduler
reward                scheduler/state.json                       scheduler
async_rewards         the same, under that name                  scheduler
replay_buffer         replay_buffer/, files that are linked      replay_buffer
rng                   rng/                                       rng

Other parts are entries of scheduler/state.json, so that a trainer adds one by an entry in its `parts`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, ClassVar, Protocol

from torch import Tensor

from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.resolve import ResumePoint
from verl.checkpoint.save.save_request import ExistingFile
from verl.checkpoint.save.snapshot import SavedComponent
from verl.cluster.rpc import WorkerGroup
from verl.component import as_plain
from verl.errors import ConfigError
from verl.replay.config import COMPONENT as REPLAY_BUFFER
from verl.rewards.base import Reward, RewardDescription
from verl.trainer.state.training_identity import differences, reward_identity
from verl.utils.seeding import RngState, derive_seed, rng_state, set_rng_state

_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """Part of the driver that a checkpoint holds."""

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint: plain values, unless the part's place says otherwise; empty if there is none."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go on from what `state_dict` gave, in place of what is here; empty where the checkpoint has nothing."""
        ...


PartStates = dict[str, Mapping[str, Any]]  # by part
# Components that a resumed trainer loads when it is built; `rng` follows when its first step begins.
WHEN_BUILT = ("dataloader", "scheduler", "replay_buffer")


def load_parts(point: ResumePoint, parts: Mapping[str, Stateful], components: Collection[str] | None = None) -> None:
    """Let parts go on from a checkpoint.

    Args:
        components: which components are loaded, see the table above; None is all.
    Raises:
        CheckpointCorrupt: a part cannot load its saved state.
    """
    for name, part in parts.items():
        place = place_of(name)
        if components is None or place.loaded_with in components:
            with point.understanding(place.path):
                part.load_state_dict(place.read(name, point))


@dataclass(frozen=True)
class CheckpointDraft:
    """Components of a checkpoint that is being saved, files that are there already, and `scheduler/state.json`."""

    components: dict[str, SavedComponent] = field(default_factory=dict)
    existing_files: list[ExistingFile] = field(default_factory=list)
    schedule: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PartPlace:
    """Place of the state of a part in a checkpoint: an entry of `scheduler/state.json`, unless a subclass has another.

    Args:
        path: of the file or directory, for messages.
        loaded_with: the component that a load names to have it.
        keys: of the state, where they are the file's own; otherwise its key is the name of the part.
    """

    path: str = "scheduler/state.json"
    loaded_with: str = "scheduler"
    keys: tuple[str, ...] = ()

    def write(self, name: str, state: Mapping[str, Any], draft: CheckpointDraft) -> None:
        """Add the state of the part of this name to a checkpoint."""
        draft.schedule.update(state if self.keys else {name: state})

    def read(self, name: str, point: ResumePoint) -> Mapping[str, Any]:
        """The state, hashed while it is read; empty if the checkpoint has none."""
        schedule = point.read_json(self.path)
        if self.keys:
            return {key: schedule[key] for key in self.keys if key in schedule}
        return schedule.get(name, {})


class JsonFile(PartPlace):
    """A separate file."""

    def write(self, name: str, state: Mapping[str, Any], draft: CheckpointDraft) -> None:
        component, file = self.path.split("/")
        draft.components[component] = SavedComponent(files={file: json_bytes(state)})

    def read(self, name: str, point: ResumePoint) -> Mapping[str, Any]:
        return point.read_json(self.path)


class TensorFile(PartPlace):
    """Tensors by name in a file of their own; no file where there are none."""

    def write(self, name: str, state: Mapping[str, Tensor], draft: CheckpointDraft) -> None:
        component, file = self.path.split("/")
        if state:
            draft.components[component] = SavedComponent(tensors=state, file=file)

    def read(self, name: str, point: ResumePoint) -> Mapping[str, Tensor]:
        return point.read_tensors(self.path.split("/")[0])


class FileSet(PartPlace):
    """Files by name: small ones as bytes, and ones that lie on the disk and are linked. Read, each is a path."""

    def write(self, name: str, state: Mapping[str, bytes | ExistingFile], draft: CheckpointDraft) -> None:
        if state:
            small = {name: data for name, data in state.items() if isinstance(data, bytes)}
            draft.components[self.path] = SavedComponent(files=small)
            draft.existing_files.extend(file for file in state.values() if isinstance(file, ExistingFile))

    def read(self, name: str, point: ResumePoint) -> Mapping[str, Any]:
        directory = point.checkpoint.directory / self.path
        return {path.name: path for path in sorted(directory.iterdir())} if directory.is_dir() else {}


class RngFiles(PartPlace):
    """The states of generators: see `GeneratorStates`.

    rng/torch.safetensors          torch, cuda_I (the driver's); rank_R.torch, rank_R.cuda_I
    rng/python.json  numpy.json    the driver's
    rng/rank_R.json                python and numpy of rank R
    """

    tensors: ClassVar[str] = "torch.safetensors"
    plain: ClassVar[tuple[str, ...]] = ("python", "numpy")

    def references(self, num_ranks: int) -> dict[str, str]:
        """Locations of the generator states, for `trainer_state.json`."""
        references = {"torch": f"rng/{self.tensors}", **{name: f"rng/{name}.json" for name in self.plain}}
        return references | {f"rank_{rank}": f"rng/rank_{rank}.json" for rank in range(num_ranks)}

    def write(self, name: str, state: Mapping[str, Any], draft: CheckpointDraft) -> None:
        tensors, plain = dict(state["driver"][0]), state["driver"][1]
        files = {f"{name}.json": plain[name] for name in self.plain}
        for rank, (theirs, values) in enumerate(state["ranks"]):
            tensors |= {f"rank_{rank}.{name}": tensor for name, tensor in theirs.items()}
            files[f"rank_{rank}.json"] = values
        small = {name: json_bytes(value) for name, value in files.items()}
        draft.components["rng"] = SavedComponent(tensors=tensors, file=self.tensors, files=small)

    def read(self, name: str, point: ResumePoint) -> Mapping[str, Any]:
        tensors = point.read_tensors("rng")
        names = [PurePosixPath(entry.path).name for entry in CheckpointReader(point.checkpoint).files("rng")]
        count = sum(name.startswith("rank_") for name in names)
        ranks = [(_below(tensors, f"rank_{rank}."), point.read_json(f"rng/rank_{rank}.json")) for rank in range(count)]
        of_driver = {name: x for name, x in tensors.items() if not name.startswith("rank_")}
        plain = {name: point.read_json(f"rng/{name}.json") for name in self.plain}
        return {"driver": (of_driver, plain), "ranks": ranks, "step": point.step}


RNG = RngFiles("rng", "rng")
PLACES: dict[str, PartPlace] = {
    "sampler": JsonFile("dataloader/state.json", "dataloader"),
    "drawn_ahead": TensorFile("drawn_ahead/rows.safetensors", "dataloader"),
    "reference_scores": TensorFile("reference_scores/scores.safetensors", "scheduler"),
    "reward": PartPlace(keys=("reward", "reward_of")),
    "replay_buffer": FileSet(REPLAY_BUFFER, REPLAY_BUFFER),
    "rng": RNG,
}


def place_of(part: str) -> PartPlace:
    return PLACES.get(part, PartPlace())


def json_bytes(value: Any) -> bytes:
    """JSON bytes, as the small files of a checkpoint are written."""
    return (json.dumps(value) + "\n").encode()


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


class RewardStats:
    """Statistics that a reward has learned of scores, and by which reward.

    Args:
        description: of the reward; files and models that it names are hashed once, if it has anything to save.
    """

    def __init__(self, description: RewardDescription, reward: Reward):
        self._description, self._reward = description, reward

    def state_dict(self) -> dict[str, Any]:
        learned = self._reward.state_dict()
        return {"reward": learned, "reward_of": self.identity} if learned else {"reward": learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """One of a version that did not say whose statistics it holds is trusted. Another reward begins anew, and that
        is logged."""
        learned, keys = state["reward"], dict[str, Any]()
        if learned and self._reward.state_dict() and "reward_of" in state:
            keys = differences({"reward": state["reward_of"]}, {"reward": self.identity})
        if keys:
            self._reward.reset_stats()
            _log.warning(
                "The reward differs from the checkpoint's (%s): its score statistics start from zero.", ", ".join(keys)
            )
        else:
            self._reward.load_state_dict(learned)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Plain values that tell this reward from others."""
        return reward_identity(as_plain(self._description))


class LossStates:
    """State of the loss of a role, in each process that holds the role: every one has seen rows of its own.

    Args:
        name: configuration path of the loss.
    """

    def __init__(self, role: Any, name: str):
        self._role, self._name = role, name

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": self._role.loss_states().result()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is loaded where the checkpoint has nothing.

        Raises:
            ConfigError: the checkpoint is of another number of processes.
        """
        here = len(self._role.loss_states().result())
        if state and len(state["ranks"]) != here:
            raise ConfigError(
                f"{self._name} keeps state in each process: the checkpoint has that of {len(state['ranks'])}, and this "
                f"run has {here}. Resume with as many, or keep the state in an advantage estimator."
            )
        self._role.set_loss_states(state.get("ranks", [])).result()


class GeneratorStates:
    """The random generators of this process, and of the processes that hold a role if they are elsewhere.

    Args:
        seed: of the run, from which a rank is seeded that the checkpoint knows nothing of.
    """

    def __init__(self, cluster: WorkerGroup, role: Any, seed: int):
        self._cluster, self._role, self._seed = cluster, role, seed

    def state_dict(self) -> dict[str, Any]:
        ranks: Sequence[RngState] = [] if self._cluster.shares_memory else self._role.rng_states().result()
        return {"driver": rng_state(), "ranks": ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._cluster.shares_memory:
            self._load_ranks(state["ranks"], derive_seed(self._seed, "resumed", state["step"]))
        set_rng_state(*state["driver"])

    def _load_ranks(self, ranks: Sequence[RngState], seed: int) -> None:
        size = len(self._role.rng_states().result())  # other roles may have more processes
        if len(ranks) != size:
            new = [str(rank) for rank in range(len(ranks), size)]
            treatment = f"of rank {', '.join(new)} are seeded anew" if new else "of its further ranks are left out"
            _log.info(
                "The checkpoint is of a run with %s, and this one has %d: the random generators %s.",
                f"{len(ranks)} processes of its roles" if ranks else "its roles in one process", size, treatment,
            )  # fmt: skip
        self._role.set_rng_states(ranks, seed).result()
