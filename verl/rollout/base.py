"""The interface of rollout engines: descriptions, requests, turns, and what an engine does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from verl.component import BuildContext, Description, component
from verl.errors import ConfigError, RolloutError
from verl.models.parallel_info import Autocast
from verl.models.turn_end import end_ids
from verl.ops.sampling import TRAINING
from verl.protocol import DataProto
from verl.rollout.generation_group import GenerationGroup
from verl.utils.memory import DeviceMemory

ALONE = BuildContext()
LOWEST_TEMPERATURE = 1e-6  # logits divided by less could overflow


# Weights from an actor in pipeline `stages`, or with sharded `experts` (sharding.ep); a user-defined torch module
# (`modules`); several `turns` of an episode; recording the experts that routers choose (`router_replay`); running as
# the role `rollout`, with a copy of the model (`rollout_worker`); prompts with `images`
Capability = Literal["stages", "experts", "modules", "turns", "router_replay", "rollout_worker", "images"]


@component
class Rollout(Description):
    """Sampling options that every rollout engine has.

    Recorded log-probabilities are log_softmax(logits / temperature) over the whole vocabulary, regardless of
    `top_k`, `top_p` and `min_new_tokens`.

    Args:
        temperature: divides the logits. Greedy decoding is chosen per request, not by a temperature of 0.
        top_k: sample from the k likeliest tokens; 0 for all.
        top_p: sample from the likeliest tokens with this total probability.
        max_new_tokens: maximum tokens of a response.
        min_new_tokens: minimum tokens of a response; stop tokens are not sampled before.
        stop_token_ids: end a response, in addition to the ends of text and of a chat's turn; kept in the response.
        router_replay: the experts that routers chose for sampled tokens are recorded (`routed_experts`), and used
            again when the actor scores and trains on these tokens.
        weight_update: with `trainer.mode=async`. `drain`: the engine finishes begun responses before it loads new
            weights, so all tokens of a response are of one version. `in_flight`: it loads them between two tokens.
        kv_cache: with `weight_update=in_flight`: `keep` the keys and values of open responses when the weights change,
            or `recompute` them.
    Attributes:
        location: of generation: in the `trainer` with the tensors that train, in a `process` of its own with a copy of
            the weights, or on a `server`.
        supports: optional features; see `Capability`.
        can_offload: whether the engine can release GPU memory between the last response of a step and the next sync.
        may_change: the engine reads `options` at every call, so they may be replaced between calls.
        call_timeout_s: maximum seconds without progress of an engine in another process; 0 for one in this process.
    """

    location: ClassVar[Literal["trainer", "process", "server"]] = "trainer"
    supports: ClassVar[frozenset[Capability]] = frozenset()
    can_offload: ClassVar[bool] = False
    may_change: ClassVar[bool] = False
    call_timeout_s: ClassVar[float] = 0.0

    temperature: Annotated[float, Field(ge=LOWEST_TEMPERATURE)] = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: PositiveInt = 128
    min_new_tokens: NonNegativeInt = 0
    stop_token_ids: tuple[int, ...] = ()
    router_replay: bool = False
    weight_update: Literal["drain", "in_flight"] = "drain"
    kv_cache: Literal["keep", "recompute"] = "keep"

    @property
    def runs_ahead(self) -> bool:
        """Whether the engine can generate while the trainer updates its weights."""
        return self.location != "trainer"

    def faults(self) -> Iterator[str]:
        if self.router_replay and "router_replay" not in self.supports:
            yield (
                f"router_replay is true: {type(self).__name__} does not tell which experts were chosen. Set it to "
                "false, or rollout=hf."
            )
        if self.min_new_tokens > self.max_new_tokens:
            limit = self.max_new_tokens
            yield f"min_new_tokens is {self.min_new_tokens}: must lie between 0 and max_new_tokens {limit}."

    def chosen_for(self, model: Any, autocast: Autocast = None) -> Rollout:
        """The description used for this model; differs from `self` only if this one chooses between engines."""
        return self

    def faults_with_actor(self, lora_rank: int | None) -> Iterator[str]:
        """Faults in combination with the actor: with the rank of its adapter, None if it has none."""
        return iter(())

    def faults_with_images(self) -> Iterator[str]:
        """Faults of a run whose prompts have images."""
        if "images" not in self.supports:
            yield f"rollout is a {type(self).__name__}, and the prompts have images: it reads none. Set rollout=hf."

    def check_here(self, device: str) -> None:
        """Check that the engine's requirements are installed, before weights are loaded.

        Raises:
            ConfigError: it is not installed on this machine.
        """

    def with_room_for(self, prompt: int, response: int | None = None) -> Rollout:
        """A copy for prompts of at most `prompt` tokens, for engines that allocate memory by sequence length.

        Args:
            response: tokens after the prompt, those of a whole episode; None for `max_new_tokens`.
        """
        return self

    def planned(self, is_gpu: bool) -> Rollout:
        """The description of the engine that a plan counts."""
        return self

    def engine_memory(
        self, config: Any, dtype: torch.dtype, memory: DeviceMemory | None, trainer_bytes: int | None
    ) -> dict[str, int] | None:
        """Bytes in each process of an engine with its own weights; None if it has none, or they are not known.

        Args:
            config: of the model.
            memory: of the GPU; None on a CPU.
            trainer_bytes: that the trainer needs there while the engine is awake; None if unknown.
        Returns:
            `weights`, `cache`, `overhead` beside these while it works, and `asleep`, what remains while it sleeps.
        """
        return None

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> RolloutEngine:
        """The engine, which samples from `model` with noise derived from `seed`, and computes in `autocast`.

        Args:
            context: the process that trains the model.
        Raises:
            ConfigError: the engine cannot run this model.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class GenerationRequest:
    """One call for responses.

    Attributes:
        step: training step; keys the noise together with prompt and sample numbers.
        num_samples: responses per prompt.
        greedy: take the likeliest token instead of sampling.
        stream: TRAINING or EVALUATION.
        uses_environment: False: a single turn in place of an episode.
    """

    step: int
    num_samples: int = 1
    greedy: bool = False
    stream: int = TRAINING
    uses_environment: bool = True


@dataclass(frozen=True)
class SyncResult:
    """Outcome of one weight sync.

    Attributes:
        note: for the log line of the sync stage.
        metrics: `sync/...`, of this step.
        is_current: the engine now generates with the trainer's current weights; False if it keeps older ones.
    """

    note: str
    metrics: dict[str, float] = field(default_factory=dict)
    is_current: bool = True


SAME_TENSORS = SyncResult("one set of weights: nothing to move")


@dataclass(frozen=True)
class TurnRequest:
    """Request for one turn of an episode, or for a response, which is an episode of one turn.

    Attributes:
        episode: number of the episode, returned with the turn.
        tokens: everything before the turn: prompt, earlier turns and observations.
        prompt_id, sample_id, step, stream: key of the sampling noise, as in `GenerationRequest`.
        turn: further part of that key; NO_TURN for a response outside of an environment.
        max_new_tokens: maximum tokens of the turn, including those of `position`.
        greedy: take the likeliest token instead of sampling.
        position: number of the last `tokens` that were already sampled in this turn; the turn continues after them.
        weights: name of the adapter that computes it; empty for the active one, of all turns.
        media_key, media: digest and tensors of the images whose placeholders are in `tokens`; see `verl.rollout.rows`.
    """

    episode: int
    tokens: list[int]
    prompt_id: int
    sample_id: int
    turn: int
    max_new_tokens: int
    step: int = 0
    stream: int = TRAINING
    greedy: bool = False
    position: int = 0
    weights: str = ""
    media_key: int = 0
    media: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)

    @property
    def prefix(self) -> tuple[str, int, tuple[int, ...]]:
        """Equal for turns that see the same tokens and the same images by the same weights."""
        return self.weights, self.media_key, tuple(self.tokens)

    @property
    def noise_key(self) -> tuple[int, int, int, int, int]:
        """Stream, step, prompt, sample and turn."""
        return self.stream, self.step, self.prompt_id, self.sample_id, self.turn


@dataclass(frozen=True)
class TurnResult:
    """One generated turn.

    Attributes:
        tokens: at least one; the stop token included, if it ended by itself.
        log_probs: of each token, by the engine.
        is_complete: it ended with a stop token; False if it was truncated by a limit.
        routed_experts: [T layers k] int16, experts of the tokens that predict the turn; None if not recorded.
        versions: of the weights that sampled each token, if they changed during the turn; else empty.
    """

    episode: int
    tokens: list[int]
    log_probs: list[float]
    is_complete: bool
    routed_experts: Tensor | None = None
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TurnLimits:
    """Properties of the turns that an engine is going to generate.

    Attributes:
        row_tokens: length of the longest episode, prompt included.
        kv_cache_gib: size of the key-value cache for unfinished episodes, if the engine keeps it in this process; 0 for
            the maximum number of rows of the engine.
        is_single: each episode has one turn, and all are added before the first `advance`, those of one prompt
            consecutively.
        while_training: the trainer updates its weights meanwhile, so a lost engine cannot get the same weights again.
        is_stepwise: each `advance` is one step of the engine.
    """

    row_tokens: int
    kv_cache_gib: float = 0.0
    is_single: bool = False
    while_training: bool = False
    is_stepwise: bool = False

    def refuse_above(self, held: int, max_new_tokens: int, limit: str) -> None:
        """Check the length of rows against that of an engine.

        Args:
            held: maximum tokens of a row in the engine.
            max_new_tokens: maximum tokens of a response.
            limit: the engine and the setting of its limit, as the end of a sentence.
        Raises:
            ConfigError: rows are longer.
        """
        if self.row_tokens <= held:
            return
        if self.is_single:
            raise ConfigError(
                f"rollout.max_new_tokens is {max_new_tokens}: with a prompt of {self.row_tokens - max_new_tokens} "
                f"tokens that makes {self.row_tokens}, and {limit}. Lower one of them."
            )
        raise ConfigError(
            f"environment.max_tokens makes episodes of up to {self.row_tokens} tokens, their prompts included, and "
            f"{limit}. Lower it, or raise that."
        )


class TurnEngine:
    """Generates turns of many episodes as one batch; turns can be added at any time and are returned as they finish.

    The weights must not change during its lifetime, because its key-value cache was computed with them, except within
    `paused`.

    Attributes:
        dtype: of the log-probs.
        lookahead: number of tokens after the sampled ones of each open turn whose logits are computed already.
        experts: layers with experts, and experts of a token, in `TurnResult.routed_experts`; None if not recorded.
        late: returns turns that join those of the current `advance`; an engine that cannot add them never calls it.
    """

    dtype: torch.dtype = torch.float32
    lookahead: int = 0
    experts: tuple[int, int] | None = None
    late: Callable[[], Sequence[TurnRequest]] = tuple

    @property
    def num_pending(self) -> int:
        """Number of turns that were added and are not finished."""
        raise NotImplementedError

    def add(self, turn: TurnRequest) -> None:
        """Queue a turn."""
        raise NotImplementedError

    def advance(self) -> list[TurnResult]:
        """Generate some tokens; returns the turns that finished."""
        raise NotImplementedError

    def forget(self, episode: int) -> None:
        """Free the cache of an episode that has ended."""

    def open_turns(self) -> list[TurnResult]:
        """The unfinished turns, with the tokens sampled so far."""
        return []

    def end(self, episode: int) -> None:
        """End an open turn early, if the engine can; otherwise it is generated to its end."""

    def paused(self) -> AbstractContextManager[None]:
        """Context in which the weights may change; open turns keep their keys and values."""
        return nullcontext()

    def close(self) -> None:
        """Free all memory. Idempotent."""


class TurnQueue(TurnEngine):
    """A `TurnEngine` whose turns wait in `queue`, in the order in which they were added."""

    def __init__(self) -> None:
        self.queue: list[TurnRequest] = []

    @property
    def num_pending(self) -> int:
        return len(self.queue)

    def add(self, turn: TurnRequest) -> None:
        self.queue.append(turn)

    def close(self) -> None:
        self.queue.clear()


class RolloutEngine:
    """A running rollout engine. `turns` is required, and `sync` if it has its own weights.

    Attributes:
        group: the processes that hold the model, and the division of their prompts.
        row_tokens: length limit of a row in the engine; None for that of the model.
        compute_type: data type of its computation, as named by `verl.models.parallel_info.compute_type`; None: that
            of the trainer.
    """

    group: GenerationGroup = GenerationGroup()
    compute_type: str | None = None
    row_tokens: int | None = None

    def turns(self, limits: TurnLimits) -> TurnEngine:
        """An engine for turns, valid until it is closed; the weights must not change before. Collective over the
        processes that generate (`group`).

        Raises:
            ConfigError: an episode is too long for the engine.
        """
        raise NotImplementedError

    def with_log_probs(self, rows: DataProto, greedy: bool) -> DataProto:
        """The rows of `assemble` with `rollout_log_probs`, for engines whose turns lack them. Collective over the
        processes that hold the model."""
        return rows

    def sync(self) -> SyncResult:
        """Load the trainer's weights and verify them.

        Raises:
            RolloutError: turns are open that the previous weights have begun.
        """
        return SAME_TENSORS

    def offload(self) -> None:
        """Free memory for training until the next `turns` or `sync`, if the engine supports it."""

    def close(self) -> None:
        """Stop all processes and connections of the engine. Idempotent."""


class EngineLost(RolloutError):
    """The process of an engine has ended, with its open turns; a sync starts another."""


def open_turns_error(count: int) -> RolloutError:
    """The error for a change of the weights during open turns."""
    return RolloutError(
        f"Weights cannot be changed while {count} turns are being generated with them. Close the turns first."
    )


def stop_tokens(model: Any, tokenizer: Any, extra: tuple[int, ...]) -> Tensor:
    """Sorted ids of the tokens that end a response: those of model, tokenizer, chat template and the run's options.

    Raises:
        ConfigError: an option names an id outside the model's vocabulary.
    """
    size = model.config.get_text_config().vocab_size
    if wrong := [i for i in extra if not 0 <= i < size]:
        raise ConfigError(f"rollout.stop_token_ids has {wrong}: token ids of the model are 0 to {size - 1}.")
    return torch.tensor(sorted(i for i in end_ids(model, tokenizer) | {*extra} if i < size), dtype=torch.int64)
