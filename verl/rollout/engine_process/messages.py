"""Messages between the trainer and the process of an engine; neither side imports the other's libraries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from verl.ops.resharding.layout import Box


@dataclass(frozen=True)
class EngineSetup:
    """Description of an engine: what its process is started with, and what the trainer has to know of it.

    Attributes:
        name: of the engine, in messages.
        server: `module:Class` of the engine, imported and made in the process.
        setting: the argument of that class.
        environment: variables of the process.
        dtype: data type of its computation.
        num_threads: threads of the engine, on a CPU.
        lora_rank: rank of an adapter that is sent unmerged; None if there is none.
    """

    name: str
    server: str
    setting: Any
    environment: dict[str, str]
    dtype: torch.dtype
    num_threads: int = 1
    is_on_gpu: bool = False
    lora_rank: int | None = None


@dataclass(frozen=True)
class EngineReply:
    """Result or error of a call.

    Attributes:
        error: the error, in one line.
        trace: its full traceback.
        lost: which of the engine's processes ended and how, if that caused the error.
    """

    result: Any = None
    error: str | None = None
    trace: str = ""
    lost: str | None = None


@dataclass(frozen=True)
class EngineInfo:
    """A running engine, as other processes see it. The engine gives the first three; the process that leads it adds
    the others for a sync.

    Attributes:
        max_model_len: prompt and response together, in tokens.
        num_workers: processes that read the weights.
        reads_peers: whether each of them can open memory of all GPUs of the engine.
        wants: the slices of tensors that each worker needs, by name; None: whole tensors are sent to all workers.
        process_id: of the engine.
        progress_path: opens its progress counter.
        call_timeout_s: largest time without progress, after which it counts as lost.
        num_threads: threads of trainer and engine each, while both work.
    """

    max_model_len: int
    num_workers: int
    reads_peers: bool = True
    wants: tuple[dict[str, Box], ...] | None = None
    process_id: int = 0
    progress_path: str = ""
    call_timeout_s: float = 300.0
    num_threads: int = 1


@dataclass
class TurnOutput:
    """Turns that have ended: their episodes, tokens, and log-probs of those.

    Attributes:
        cached_tokens: tokens of their prompts that came from the prefix cache.
        experts: of each turn [T layers k], of the tokens that predict it; None without `rollout.router_replay`.
    """

    episodes: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    log_probs: list[list[float]] = field(default_factory=list)
    cached_tokens: int = 0
    experts: list[torch.Tensor] | None = None
