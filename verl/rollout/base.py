"""The interface of rollout engines: a generation request, and rows of prompts with their responses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from verl.component import BuildContext, Description, component
from verl.errors import ConfigError, RolloutError
from verl.models.parallel_info import Autocast
from verl.ops.counter_rng import TRAINING
from verl.protocol import DataProto
from verl.rollout.generation_group import GenerationGroup
from verl.rollout.prompt_rows import right_padded

ALONE = BuildContext()
DRAWN = ("response_mask", "responses", "rollout_log_probs")  # fields that an engine makes
LARGEST_LOG_PROB = 1e-3  # nats above 0 that are put down to rounding; more is not a log-prob
PLACEHOLDER = -9000.0  # nats: values at or below are minus infinity, such as -9999 of vLLM


# Weights from an actor in pipeline `stages`, or whose `experts` are divided (sharding.ep); a torch module of the user's
# (`modules`); several `turns` of an episode; recording the experts that routers choose (`router_replay`)
Capability = Literal["stages", "experts", "modules", "turns", "router_replay"]


@component
class Rollout(Description):
    """Sampling options that every rollout engine has.

    Recorded log-probabilities are log_softmax(logits / temperature) over the whole vocabulary, whatever is cut off
    by `top_k`, `top_p` or `min_new_tokens` when drawing.

    Args:
        temperature: divides the logits; above 0. Greedy decoding is chosen per request, not by a temperature of 0.
        top_k: draw among the k likeliest tokens; 0 for all.
        top_p: draw among the likeliest tokens that hold this share of the probability.
        max_new_tokens: the most tokens of a response.
        min_new_tokens: the least tokens of a response; stop tokens are not sampled before.
        stop_token_ids: end a response, in addition to the model's own end-of-text tokens; kept in the response.
        router_replay: the experts that routers chose for sampled tokens are recorded (`routed_experts`), and used
            again where the actor scores and learns from these tokens.
    Attributes:
        location: of generation: in the `trainer` with the tensors that train, in a `process` beside it with its own
            copy of the weights, or on a `server`.
        supports: what it can do beyond responses of a model of transformers; see `Capability`.
        can_rest: whether the engine can release GPU memory between the last response of a step and the next sync.
        may_change: the engine reads `options` at every call, so they may be replaced between calls.
        call_timeout_s: how long an engine in another process may make no progress; 0 for an engine in this process.
    """

    location: ClassVar[Literal["trainer", "process", "server"]] = "trainer"
    supports: ClassVar[frozenset[Capability]] = frozenset()
    can_rest: ClassVar[bool] = False
    may_change: ClassVar[bool] = False
    call_timeout_s: ClassVar[float] = 0.0

    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: PositiveInt = 128
    min_new_tokens: NonNegativeInt = 0
    stop_token_ids: tuple[int, ...] = ()
    router_replay: bool = False

    @property
    def runs_ahead(self) -> bool:
        """Whether the engine can generate while the trainer updates its weights."""
        return self.location != "trainer"

    def faults(self) -> Iterator[str]:
        if self.router_replay and "router_replay" not in self.supports:
            yield (
                f"router_replay is true: {type(self).__name__} does not tell which experts were chosen. Set it to "
                "false, or rollout=hf or vllm."
            )
        if self.min_new_tokens > self.max_new_tokens:
            limit = self.max_new_tokens
            yield f"min_new_tokens is {self.min_new_tokens}: must lie between 0 and max_new_tokens {limit}."

    def chosen_for(self, model: Any, autocast: Autocast = None) -> Rollout:
        """The description used for this model; another one than `self` only if this one chooses between engines."""
        return self

    def faults_with_actor(self, lora_rank: int | None, is_divided: bool) -> Iterator[str]:
        """Faults in combination with the actor: the rank of its adapter, and whether its weights are sharded."""
        return iter(())

    def check_here(self, device: str) -> None:
        """Check that the engine's requirements are installed, before weights are loaded.

        Raises:
            ConfigError: it is not installed on this machine.
        """

    def with_room_for(self, prompt: int, response: int | None = None) -> Rollout:
        """A copy for prompts of at most this many tokens, for engines that allocate memory by sequence length.

        Args:
            response: tokens after the prompt, those of a whole episode; None for `max_new_tokens`.
        """
        return self

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> RolloutEngine:
        """The engine, sampling from `model` with noise that derives from `seed`; it computes as `autocast` says.

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
        greedy: take the likeliest token instead of drawing.
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
        note: shown in the log line of the sync stage.
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
        episode: number that comes back with the turn.
        tokens: everything before the turn: prompt, earlier turns and observations.
        prompt_id, sample_id, step, stream: key of the sampling noise, as in `GenerationRequest`.
        turn: further part of that key; NO_TURN for a response outside of an environment.
        max_new_tokens: the most tokens of the turn.
        greedy: take the likeliest token instead of drawing.
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

    @property
    def noise_key(self) -> tuple[int, int, int, int, int]:
        """Stream, step, prompt, sample and turn."""
        return self.stream, self.step, self.prompt_id, self.sample_id, self.turn


@dataclass(frozen=True)
class DrawnTurn:
    """One generated turn.

    Attributes:
        tokens: at least one; the stop token included, if it ended by itself.
        log_probs: of each token, by the engine that drew it.
        is_complete: it ended with a stop token; False where a limit cut it.
        routed_experts: [T layers k] int16, experts of the tokens that predict the turn; None if not recorded.
    """

    episode: int
    tokens: list[int]
    log_probs: list[float]
    is_complete: bool
    routed_experts: Tensor | None = None


@dataclass(frozen=True)
class TurnLimits:
    """Properties of the turns that an engine is going to generate.

    Attributes:
        row_tokens: length of the longest episode, prompt included.
        kv_cache_gib: size of the key-value cache for unfinished episodes, if the engine keeps it in this process.
        is_single: each episode has one turn, and all are added before the first `advance`, those of one prompt side by
            side.
        while_training: the trainer updates its weights meanwhile; an engine that dies cannot get the same ones again.
    """

    row_tokens: int
    kv_cache_gib: float = 0.0
    is_single: bool = False
    while_training: bool = False

    @property
    def setting(self) -> str:
        """The setting that makes rows long, for messages."""
        return "rollout.max_new_tokens" if self.is_single else "environment.max_tokens"

    def refuse_above(self, held: int, max_new_tokens: int, limit: str) -> None:
        """Check the length of rows against that of an engine.

        Args:
            held: the most tokens of a row in the engine.
            max_new_tokens: the most tokens of a response.
            limit: which engine holds so many, and by which setting; the end of a sentence.
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

    The weights must not change during its lifetime, because its key-value cache was computed with them.

    Attributes:
        dtype: of the log-probs.
        experts: layers with experts, and experts of a token, in `DrawnTurn.routed_experts`; None if not recorded.
    """

    dtype: torch.dtype = torch.float32
    experts: tuple[int, int] | None = None

    @property
    def num_pending(self) -> int:
        """Number of turns that were added and are not finished."""
        raise NotImplementedError

    def add(self, turn: TurnRequest) -> None:
        """Queue a turn."""
        raise NotImplementedError

    def advance(self) -> list[DrawnTurn]:
        """Generate some tokens; returns the turns that finished."""
        raise NotImplementedError

    def forget(self, episode: int) -> None:
        """Free the cache of an episode that has ended."""

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
    """A running rollout engine. `turns` is required, and `sync` if it has weights of its own.

    Attributes:
        group: the processes that hold the model, and how they divide the generation of their prompts.
        row_tokens: length limit of a row in the engine; None: that of the model alone.
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
            RolloutError: turns are open, which the former weights have begun.
        """
        return SAME_TENSORS

    def rest(self) -> None:
        """Free memory for training until the next `turns` or `sync`, if the engine supports it."""

    def close(self) -> None:
        """Stop all processes and connections of the engine. Idempotent."""


def open_turns_error(count: int) -> RolloutError:
    """The error for a change of weights while turns are open."""
    return RolloutError(
        f"Weights cannot be changed while {count} turns are being generated with them. Close the turns first."
    )


def stop_tokens(model: Any, tokenizer: Any, extra: tuple[int, ...]) -> Tensor:
    """Sorted ids of the tokens that end a response: those of the model, the tokenizer and the run's options.

    Raises:
        ConfigError: an option names an id outside the model's vocabulary.
    """
    size = model.config.get_text_config().vocab_size
    if wrong := [i for i in extra if not 0 <= i < size]:
        raise ConfigError(f"rollout.stop_token_ids has {wrong}: token ids of the model are 0 to {size - 1}.")
    configured = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *extra}
    ids |= set(configured if isinstance(configured, list) else [configured])
    return torch.tensor(sorted(i for i in ids if i is not None and i < size), dtype=torch.int64)


def assemble(
    prompts: DataProto,
    num_samples: int,
    responses: Tensor,
    mask: Tensor,
    log_probs: Tensor,
    pad_id: int,
    attended: Tensor | None = None,
    routed: Tensor | None = None,
    sample_ids: Tensor | None = None,
) -> DataProto:
    """Join prompts and their responses into the rows that training reads.

    Args:
        prompts: `prompts`, `prompt_mask` [b P], `prompt_ids`, `group_ids` [b].
        responses, mask, log_probs: [b * num_samples, T], a prompt's samples side by side.
        pad_id: fills the places without a token.
        attended: [b * num_samples, T], True on all tokens of the response, including those that the policy did not
            sample; None if it sampled all of them.
        routed: [b * num_samples, T layers k], experts of each token, -1 off the mask; None if not recorded.
        sample_ids: [b * num_samples]; None to count them.
    Returns:
        B = b * num_samples rows with the fields of prompts, and `sample_ids`, `input_ids`, `attention_mask`,
        `position_ids`, `responses`, `response_mask`, `rollout_log_probs`; T is the longest response.
    Raises:
        RolloutError: a log-prob is invalid or a token id is negative; names prompt, sample and token.
    """
    attended = mask if attended is None else attended
    width = int(attended.sum(dim=1).max()) if attended.numel() else 0
    mask, attended = mask[:, :width], attended[:, :width]
    responses = responses[:, :width].masked_fill(~attended, pad_id)
    rows = prompts.select(["prompts", "prompt_mask", "prompt_ids", "group_ids"]).repeat(num_samples)
    made = DataProto.from_dict(
        {
            "sample_ids": torch.arange(num_samples).repeat(len(prompts)) if sample_ids is None else sample_ids,
            **sequence_fields(rows.batch["prompts"], rows.batch["prompt_mask"], responses, attended),
            "responses": responses,
            "response_mask": mask,
            "rollout_log_probs": log_probs[:, :width].masked_fill(~mask, 0.0),
        }
    )
    if routed is not None:
        made = made.union(DataProto.from_dict({"routed_experts": routed[:, :width].clone()}))
    made = rows.union(made)
    refuse_wrong_responses(made)
    return made


def sequence_fields(prompts: Tensor, prompt_mask: Tensor, responses: Tensor, attended: Tensor) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `position_ids` [B S] of prompts [B P] and the tokens after them [B T]."""
    attention = torch.cat([prompt_mask, attended], dim=1).long()
    return {
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0),
    }


def assemble_turns(
    prompts: DataProto,
    drawn: Sequence[DrawnTurn],
    turns: TurnEngine,
    pad_id: int,
    num_samples: int = 1,
    sample_ids: Tensor | None = None,
) -> DataProto:
    """Rows of responses; see `assemble`.

    Args:
        drawn: the single turn of each response, a prompt's samples side by side.
        turns: the engine that generated them.
    Raises:
        RolloutError: a log-prob is invalid or a token id is negative; names prompt, sample and token.
    """
    responses = right_padded([turn.tokens for turn in drawn], pad_id, torch.int64)
    log_probs = right_padded([turn.log_probs for turn in drawn], 0.0, turns.dtype)
    lengths, routed = torch.tensor([len(turn.tokens) for turn in drawn], dtype=torch.int64), None
    mask = torch.arange(responses.shape[1]) < lengths[:, None]
    if turns.experts is not None:
        routed = torch.full((*responses.shape, *turns.experts), -1, dtype=torch.int16)
        for row, turn in enumerate(drawn):
            if turn.routed_experts is not None:
                routed[row, : len(turn.tokens)] = turn.routed_experts
    return assemble(prompts, num_samples, responses, mask, log_probs, pad_id, routed=routed, sample_ids=sample_ids)


def refuse_wrong_responses(rows: DataProto, num_tokens: int | None = None) -> None:
    """Check the responses of any engine.

    Args:
        rows: as of `assemble`.
        num_tokens: size of the model's vocabulary; None if the model is not known here.
    Raises:
        RolloutError: see `assemble`.
    """
    if missing := [name for name in DRAWN if name not in rows.batch]:
        raise RolloutError(
            f"The rollout engine gives rows without {', '.join(missing)}: see verl.rollout.base.assemble."
        )
    mask, tokens, log_probs = (rows.batch[name] for name in DRAWN)
    if not bool(mask.any()):
        return
    lowest, highest = log_probs[mask].aminmax()  # one pass: nan comes through
    if not (float(lowest) > PLACEHOLDER and float(highest) <= LARGEST_LOG_PROB):
        exact = log_probs.double()
        is_wrong = ~((exact > PLACEHOLDER) & (exact <= LARGEST_LOG_PROB)) & mask
        row, place = is_wrong.nonzero()[0].tolist()
        fault = log_prob_fault(float(exact[row, place]))
        raise RolloutError(f"{_of_token(rows, row, place)} has the log-prob {fault}. {_count(is_wrong, mask)}")
    lowest, highest = tokens[mask].aminmax()
    if int(lowest) < 0 or (num_tokens is not None and int(highest) >= num_tokens):
        is_wrong = ((tokens < 0) | (tokens >= (num_tokens or int(highest) + 1))) & mask
        row, place = is_wrong.nonzero()[0].tolist()
        known = "no id is negative" if num_tokens is None else f"the model knows 0 to {num_tokens - 1}"
        raise RolloutError(
            f"{_of_token(rows, row, place)} is not a token: {known}. {_count(is_wrong, mask)} Does the engine run with "
            "the actor's tokenizer?"
        )


def log_prob_fault(log_prob: float) -> str | None:
    """Why a number cannot be the log-prob of a sampled token, with the number; None if it can."""
    if PLACEHOLDER < log_prob <= LARGEST_LOG_PROB:
        return None
    if LARGEST_LOG_PROB < log_prob < math.inf:
        return f"{log_prob:.3f}: above 0 it is none. Does the engine run with a logits mode?"
    if not log_prob < 0 or log_prob == -math.inf:
        return f"{log_prob}, one that is not finite: the logits were not, or the token was cut off before it was drawn"
    return (
        f"{log_prob:g}: that is written in place of a probability of zero (vLLM: -9999), and such a token cannot be "
        "drawn. Log-probs must be log_softmax(logits / temperature) over the whole vocabulary, of the tokens drawn"
    )


def _of_token(rows: DataProto, row: int, place: int) -> str:
    prompt, sample = int(rows["prompt_ids"][row]), int(rows["sample_ids"][row])
    length, token = int(rows["response_mask"][row].sum()), int(rows["responses"][row, place])
    return (
        f"The rollout engine's response to prompt {prompt}, sample {sample}: token {place + 1} of {length}, id {token},"
    )


def _count(is_wrong: Tensor, mask: Tensor) -> str:
    return f"{int(is_wrong.sum())} such of {int(mask.sum())} tokens."
