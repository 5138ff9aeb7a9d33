"""Settings of a run that belong to no single component: how long, how often, how many, on which devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt

from verl.cluster.placement import Placement
from verl.component import Description, component
from verl.monitoring.config import Monitoring
from verl.ops.cpu_matmul import CpuMatmul, library_fault
from verl.trainer.timers import Profile

LONGEST_NAME = 200  # bytes; file systems allow 255, and suffixes are appended


@component
class LoopSettings(Description):
    """Settings that PPO and SFT share.

    Args:
        project_name, experiment_name: names of the run; part of its directory, and of that of its checkpoints.
        seed: seed of all randomness of the run.
        device: `auto`: a GPU if there is one; or a torch device such as `cpu` or `cuda:1`.
        num_threads: CPU threads of torch, over all processes. `auto`: as many as are fastest, measured at the start, or
            those of the resumed run; `OMP_NUM_THREADS` limits them. null: torch's default.
        cpu_matmul: library of large float32 matrix products on a CPU: `mkl`, `onednn`, or `auto`: by the processor.
            Their last bits differ.
        n_gpus_per_node: processes on this machine, each with a GPU where there are GPUs; 1 with sharding=none.
        nnodes: machines.
        total_epochs: passes over the training data.
        total_steps: training steps. The first of both limits that is reached ends the run; default: one epoch.
        stop_after: save and end after this step, so that `resume=latest` continues; schedules are those of the whole
            run. null: no such step.
        eval_before: evaluate the weights before the first step.
        eval_interval: steps between evaluations; 0 for none but the last.
        sample_rows: rows kept in each table of samples, and of tokens.
        strict_data_check: check the content of every batch, as VERL_STRICT_DATA_CHECK=1 does.
        save_final: write the weights at the end as Hugging Face directories.
        repeat_first_batch: train only on the first batch of the data, to test whether it can be learned.
        profile: steps to profile, or null.
        safety: handling of non-finite numbers and of gaps of log-probs.
        placement: where the roles run; null: in this process, or in the processes of the sharding.
    """

    project_name: str = "verl"
    experiment_name: str = "default"
    seed: NonNegativeInt = 0
    device: str = "auto"
    num_threads: PositiveInt | Literal["auto"] | None = "auto"
    cpu_matmul: CpuMatmul = "auto"
    n_gpus_per_node: PositiveInt = 1
    nnodes: PositiveInt = 1
    total_epochs: PositiveInt | None = None
    total_steps: PositiveInt | None = None
    stop_after: PositiveInt | None = None
    eval_before: bool = True
    eval_interval: NonNegativeInt = 0
    sample_rows: NonNegativeInt = 32
    strict_data_check: bool = False
    save_final: bool = True
    repeat_first_batch: bool = False
    profile: Profile | None = None
    safety: Monitoring = field(default_factory=Monitoring)
    placement: Placement | None = None

    def faults(self) -> Iterator[str]:
        for name in ("project_name", "experiment_name"):
            if (fault := _name_fault(getattr(self, name))) is not None:
                yield f"{name} is {getattr(self, name)!r}: {fault}, and directories are called after it."
        if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?", self.device):
            yield f"device is {self.device!r}: expected auto, cpu, cuda or one GPU such as cuda:1."

    def machine_faults(self) -> Iterator[str]:
        """Faults of running on this machine; the run can be planned on any."""
        device = self.device
        if self.nnodes > 1 and (self.placement is None or not self.placement.spans_machines):
            yield (
                f"nnodes is {self.nnodes}: nothing joins this run with other machines. Set nnodes=1, or join machines "
                "with Ray: `ray start --head` on one, `ray start --address=HEAD:6379` on the others, and "
                f"{self.ray_option} trainer.placement.address=auto on the first (docs/scaling.md)."
            )
        if self.placement is not None:
            yield from (f"placement.{fault}" for fault in self.placement.machine_faults())
        if (fault := library_fault(self.cpu_matmul)) is not None:
            yield f"cpu_matmul is {self.cpu_matmul!r}: {fault}."
        if device.startswith("cuda") and (torch.device(device).index or 0) >= (count := torch.cuda.device_count()):
            gpus = f"{count} GPUs, numbered from 0," if count else "no GPU"
            yield f"device is {device!r}: torch finds {gpus} here. Set trainer.device=auto."

    ray_option: ClassVar[str] = "trainer=ray"

    @property
    def max_restarts(self) -> int:
        """Maximum number of automatic restarts after a lost worker."""
        return 0 if self.placement is None else self.placement.max_restarts

    def num_steps(self, steps_of: Callable[[int], int]) -> int:
        """Steps of the whole run; `steps_of` gives those of a number of epochs."""
        if self.total_epochs is None:
            return steps_of(1) if self.total_steps is None else self.total_steps
        epochs = steps_of(self.total_epochs)
        return epochs if self.total_steps is None else min(epochs, self.total_steps)


@component
class PPOSettings(LoopSettings):
    """Settings of a policy-gradient run. See `LoopSettings` for the others.

    Args:
        prompts_per_step: different prompts per step.
        group_size: responses per prompt.
        eval_samples: k of mean@k and best@k, sampled at the rollout's temperature; 0 evaluates greedily only.
        eval_without_tools: evaluate a second time without the tools of the environment: prompts without their schemas,
            one turn, and nothing is executed.
        success_score: a response with at least this score counts as correct in `eval/accuracy`.
        mode: `sync`: generate and train alternately. `async`: at the same time (docs/async.md).
        max_staleness: with `mode=async`, maximum number of weight syncs between the generation of a token and training
            on it; above 0 it requires `algorithm.correction` or `algorithm.proximal=behaviour`.
        replay_schedule: directory of a run with `rollout.weight_update=in_flight` that this run repeats bit by bit,
            with events at the same steps of the engine, on equal hardware with equal libraries and settings; or null.
    """

    prompts_per_step: PositiveInt = 64
    group_size: PositiveInt = 8
    mode: Literal["sync", "async"] = "sync"
    max_staleness: NonNegativeInt = 1
    replay_schedule: str | None = None
    eval_samples: NonNegativeInt = 0
    eval_without_tools: bool = False
    success_score: float = 1.0

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.staleness and self.repeat_first_batch:
            yield "mode is async: with repeat_first_batch every batch is the first. Set mode=sync."

    @property
    def staleness(self) -> int | None:
        """`max_staleness` of an asynchronous run; None of a synchronous one."""
        return self.max_staleness if self.mode == "async" else None


@component
class SFTSettings(LoopSettings):
    """Settings of supervised fine-tuning. See `LoopSettings` for the others.

    Args:
        batch_size: sequences of one optimizer step.
    """

    batch_size: PositiveInt = 64

    ray_option: ClassVar[str] = "trainer=sft_ray"


def _name_fault(name: str) -> str | None:
    """Why a name cannot be used for a subdirectory; None if it can."""
    if not name.strip():
        return "it is empty"
    if name.startswith(("/", "~")) or any(part in (".", "..", "") for part in name.split("/")):
        return "it leads out of the directory of runs"
    if any(len(part.encode()) > LONGEST_NAME for part in name.split("/")):
        return f"it is longer than {LONGEST_NAME} bytes"
    if not name.isprintable():
        return "it has characters that cannot be printed"
    return None
