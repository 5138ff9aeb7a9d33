"""Protocols of inference servers: OpenAI-compatible `POST /v1/completions` and TGI's `POST /generate`.

`ServerProtocol` is the interface; `SamplingRequest` and `ServerResponse` are the same for both. The `read_...`
functions are the only code that parses token ids, log-probs and finish reasons of a server's JSON: each returns the
value or raises `RetryableAnswer` with the value and its path, or `NotRetryable` if a retry cannot help.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from verl.errors import RolloutError
from verl.http_client.request import NotRetryable, Request, RetryableAnswer
from verl.rollout.rows import log_prob_fault
from verl.rollout.server.weight_update import ServerWeightUpdate, WorkerReload


@dataclass(frozen=True)
class SamplingRequest:
    """Sampling options of one response.

    Attributes:
        max_tokens, min_tokens: of the response.
        greedy: choose the likeliest token at each position; `temperature`, `top_k` and `top_p` are ignored.
        seed: of this response; None: the server's own.
        stop_ids: tokens that end it, and belong to it.
        tells_prompt: whether to return log-probs of the prompt's tokens too.
        num_tokens: vocabulary size of the actor's model; ids of a response are below it. None if not known.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    tells_prompt: bool = False
    num_tokens: int | None = None


@dataclass(frozen=True)
class ServerResponse:
    """One response.

    Attributes:
        ids: its tokens, including the stop token.
        log_probs: of each token, by the server's definition.
        prompt_log_probs: of each token of the prompt but the first, if they were requested and the server has them.
    """

    ids: list[int]
    log_probs: list[float]
    prompt_log_probs: list[float] | None = None


class ServerProtocol(ABC):
    """The protocol of one kind of server.

    Attributes:
        path: of a request for a response.
        takes_ids: whether prompts are sent as token ids rather than as text.
        limit: the server's limit on tokens of prompt and response; None if it reports none.
        weight_update: how it takes new weights.
    """

    weight_update: ClassVar[type[ServerWeightUpdate]] = WorkerReload
    path: str
    takes_ids: bool = True
    limit: int | None = None

    def can_send(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt reaches the server as these tokens; not all do as text."""
        return True

    @abstractmethod
    def body(self, prompt: Sequence[int], sampling_params: SamplingRequest) -> dict[str, Any]:
        """The request for one response to a prompt."""

    @abstractmethod
    def read(self, answer: Any, prompt: Sequence[int], sampling_params: SamplingRequest) -> ServerResponse:
        """The response.

        Raises:
            RetryableAnswer: the reply holds no valid response. NotRetryable: this server cannot return one.
        """


class GenerateRequest(Request):
    """The request of one response.

    Attributes:
        response: the response, once it has arrived.
    """

    def __init__(self, protocol: ServerProtocol, prompt: Sequence[int], sampling_params: SamplingRequest):
        self.path, self.protocol, self.prompt, self.sampling_params = protocol.path, protocol, prompt, sampling_params
        self.response: ServerResponse | None = None

    def body(self) -> Any:
        return self.protocol.body(self.prompt, self.sampling_params)

    def read(self, answer: Any) -> None:
        self.response = self.protocol.read(answer, self.prompt, self.sampling_params)


def checked(response: ServerResponse, was_cut: bool, sampling_params: SamplingRequest) -> ServerResponse:
    """Check a parsed response against its request.

    Args:
        was_cut: whether it ended at its maximum length rather than by a stop token.
    Raises:
        RetryableAnswer: it is incomplete, or its numbers of log-probs and tokens differ.
        NotRetryable: it ended with a token that is not a stop token of this run.
    """
    ids, log_probs = response.ids, response.log_probs
    if not ids or len(ids) > sampling_params.max_tokens or (was_cut and len(ids) < sampling_params.max_tokens):
        raise RetryableAnswer(f"a response of {len(ids)} tokens, where {sampling_params.max_tokens} were requested")
    if len(log_probs) != len(ids):
        raise RetryableAnswer(f"{len(log_probs)} log-probs for {len(ids)} tokens")
    if not was_cut and ids[-1] not in sampling_params.stop_ids:
        raise NotRetryable(
            f"a response that ended with token {ids[-1]}, which ends none here. Add it to stop_token_ids."
        )
    return response


SHOWN = 60  # characters of a value in a message


def read_mapping(value: Any, what: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise RetryableAnswer(f"{what} is {shown_value(value)}, and not an object")
    return value


def read_items(value: Any, what: str) -> list[Any]:
    """A JSON list."""
    if not isinstance(value, list):
        raise RetryableAnswer(f"{what} is {shown_value(value)}, and not a list")
    return value


def read_token_id(value: Any, what: str, num_tokens: int | None) -> int:
    """A token id of the model.

    Args:
        num_tokens: size of the vocabulary; None if not known.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise RetryableAnswer(f"{what} is {shown_value(value)}, and not the id of a token")
    if value < 0 or (num_tokens is not None and value >= num_tokens):
        known = "not negative" if num_tokens is None else f"0 to {num_tokens - 1}"
        raise RetryableAnswer(f"{what} is {shown_value(value)}: ids of the actor's model are {known}")
    return value


def read_token_ids(value: Any, what: str, num_tokens: int | None) -> list[int]:
    """A list of token ids of the model."""
    return [read_token_id(item, f"{what}[{index}]", num_tokens) for index, item in enumerate(read_items(value, what))]


def read_log_prob(value: Any, what: str) -> float:
    """The log-prob of a sampled token: a finite number, at most `LARGEST_LOG_PROB`, and no placeholder."""
    number = read_number(value, what)
    if (fault := log_prob_fault(number)) is not None:
        raise (NotRetryable if number > 0 else RetryableAnswer)(f"{what} is a log-prob of {fault}")
    return number


def read_log_probs(value: Any, what: str) -> list[float]:
    """A list of log-probs of sampled tokens."""
    return [read_log_prob(item, f"{what}[{index}]") for index, item in enumerate(read_items(value, what))]


def read_number(value: Any, what: str) -> float:
    """Any number, finite or not; strings, booleans and lists are rejected."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise RetryableAnswer(f"{what} is {shown_value(value)}, and not a number")
    try:
        return float(value)
    except OverflowError:
        raise RetryableAnswer(f"{what} is {shown_value(value)}, which no floating-point number holds") from None


def read_finish_reason(value: Any, what: str, known: Collection[str]) -> str:
    """Why a response ended."""
    if not isinstance(value, str):
        raise RetryableAnswer(f"{what} is {shown_value(value)}, and not a text")
    if value not in known:
        raise RetryableAnswer(f"a response that was broken off (finish_reason {value[:SHOWN]})")
    return value


def shown_value(value: Any) -> str:
    """A value in a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


TEXT_ONLY = (
    "text without token ids. Training needs the very tokens that were drawn, and a text can be cut into tokens in many "
    "ways: use a server that gives them, by return_token_ids"
)


class OpenAIProtocol(ServerProtocol):
    """Sends every sampling option, because servers take missing ones from the model's generation config."""

    path = "/v1/completions"

    def __init__(self, model: str, limit: int | None = None):
        self.model, self.limit = model, limit

    def body(self, prompt: Sequence[int], sampling_params: SamplingRequest) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "n": 1,
            "max_tokens": sampling_params.max_tokens,
            "min_tokens": sampling_params.min_tokens,
            "temperature": 0.0 if sampling_params.greedy else sampling_params.temperature,
            "top_k": 0 if sampling_params.greedy else sampling_params.top_k,
            "top_p": 1.0 if sampling_params.greedy else sampling_params.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(sampling_params.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if sampling_params.seed is not None:
            body["seed"] = sampling_params.seed
        if sampling_params.tells_prompt:
            body["prompt_logprobs"] = 0
        return body

    def read(self, answer: Any, prompt: Sequence[int], sampling_params: SamplingRequest) -> ServerResponse:
        choice = _only_choice(answer)
        reason = read_finish_reason(choice["finish_reason"], "choices[0].finish_reason", ("stop", "length"))
        logprobs = read_mapping(choice.get("logprobs") or {}, "choices[0].logprobs")
        if not choice.get("token_ids"):
            raise NotRetryable(TEXT_ONLY)
        ids = read_token_ids(choice["token_ids"], "choices[0].token_ids", sampling_params.num_tokens)
        if (log_probs := logprobs.get("token_logprobs")) is None or (isinstance(log_probs, list) and None in log_probs):
            raise NotRetryable("tokens without log-probs, which training needs")
        log_probs = read_log_probs(log_probs, "choices[0].logprobs.token_logprobs")
        if (seen := choice.get("prompt_token_ids")) is not None and seen != list(prompt):
            raise NotRetryable("another prompt than was sent: it changes token ids")
        of_prompt = _of_prompt(choice.get("prompt_logprobs"), prompt) if sampling_params.tells_prompt else None
        return checked(ServerResponse(ids, log_probs, of_prompt), reason == "length", sampling_params)


def _only_choice(answer: Any) -> dict[str, Any]:
    """The only choice of the reply (`n` is 1)."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices:
        raise RetryableAnswer("an answer without choices[0].finish_reason")
    if len(choices) > 1:
        raise RetryableAnswer(f"{len(choices)} choices, where one response was requested (n is 1)")
    choice = choices[0]
    if not isinstance(choice, dict) or "finish_reason" not in choice:
        raise RetryableAnswer("an answer without choices[0].finish_reason")
    if (index := choice.get("index", 0)) != 0 or isinstance(index, bool):
        raise RetryableAnswer(f"choices[0].index is {shown_value(index)}, where one response was requested (n is 1)")
    return choice


def _of_prompt(logprobs: Any, prompt: Sequence[int]) -> list[float] | None:
    """Prompt log-probs from `[null, {"17": {"logprob": -1.5}}, ...]`, one mapping per token; None if absent."""
    if logprobs is None:
        return None
    log_probs = []
    if len(read_items(logprobs, "choices[0].prompt_logprobs")) != len(prompt):
        raise RetryableAnswer(f"{len(logprobs)} prompt_logprobs for a prompt of {len(prompt)} tokens")
    for position, token in enumerate(prompt):
        what = f"choices[0].prompt_logprobs[{position}]"
        if position == 0:
            continue  # nothing predicts it
        entry = read_mapping(logprobs[position], what).get(str(token))
        if entry is None:
            raise RetryableAnswer(f"{what} has no log-prob of the prompt's own token {token}")
        log_probs.append(read_log_prob(read_mapping(entry, what).get("logprob"), what))
    return log_probs


REASONS = ("length", "eos_token", "stop_sequence")  # why a response ends


class TGIProtocol(ServerProtocol):
    """Prompts are sent as text, so only prompts that survive decoding and encoding unchanged can be sent.

    Args:
        tokenizer: the actor's.
    """

    path = "/generate"
    takes_ids = False

    def __init__(self, tokenizer: Any, limit: int | None = None):
        self.tokenizer, self.limit = tokenizer, limit

    def can_send(self, prompt: Sequence[int]) -> bool:
        try:
            return bool(self.as_text(prompt))
        except RolloutError:
            return False

    def body(self, prompt: Sequence[int], sampling_params: SamplingRequest) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling_params.max_tokens,
            "do_sample": not sampling_params.greedy,
            "return_full_text": False,
            "details": True,
            "decoder_input_details": sampling_params.tells_prompt,
        }
        if not sampling_params.greedy:
            parameters["temperature"] = sampling_params.temperature
            if sampling_params.top_k > 0:
                parameters["top_k"] = sampling_params.top_k
            if sampling_params.top_p < 1:  # it refuses 1 itself
                parameters["top_p"] = sampling_params.top_p
        if sampling_params.seed is not None:
            parameters["seed"] = sampling_params.seed
        return {"inputs": self.as_text(prompt), "parameters": parameters}

    def read(self, answer: Any, prompt: Sequence[int], sampling_params: SamplingRequest) -> ServerResponse:
        details = answer.get("details") if isinstance(answer, dict) else None
        if not isinstance(details, dict):
            raise NotRetryable("an answer without details, which hold the tokens: is it TGI's /generate?")
        if "finish_reason" not in details or "tokens" not in details:
            raise RetryableAnswer("an answer whose details hold no finish_reason and tokens with id and logprob")
        reason = read_finish_reason(details["finish_reason"], "details.finish_reason", REASONS)
        tokens = _listed(details["tokens"], "details.tokens")
        ids = [read_token_id(token.get("id"), f"{what}.id", sampling_params.num_tokens) for what, token in tokens]
        reply = ServerResponse(ids, [read_log_prob(token.get("logprob"), f"{what}.logprob") for what, token in tokens])
        if (count := details.get("generated_tokens")) is not None and count != len(ids):
            raise RetryableAnswer(
                f"details.generated_tokens is {shown_value(count)}, and details.tokens has {len(ids)}"
            )
        prefill = _listed(details.get("prefill") or [], "details.prefill")
        if sampling_params.tells_prompt and prefill:
            seen = [read_token_id(token.get("id"), f"{what}.id", None) for what, token in prefill]
            if seen != list(prompt):
                raise NotRetryable(
                    f"its tokenizer reads a prompt as {seen}, the actor's as {list(prompt)}: another model"
                )
            logprobs = [read_log_prob(token.get("logprob"), f"{what}.logprob") for what, token in prefill[1:]]
            reply = replace(reply, prompt_log_probs=logprobs)
        return checked(reply, reason == "length", sampling_params)

    def as_text(self, prompt: Sequence[int]) -> str:
        """The text that encodes to exactly this prompt, without the special tokens that the tokenizer prepends.

        Raises:
            RolloutError: there is no such text.
        """
        for start in (0, 1):
            text = self.tokenizer.decode(list(prompt[start:]), skip_special_tokens=False)
            if self.tokenizer(text)["input_ids"] == list(prompt):
                return text
        shown = self.tokenizer.decode(list(prompt))
        raise RolloutError(
            f"no text is read as the tokens of the prompt {shown[:80]!r}, and TGI takes texts only. Use a server that "
            "takes token ids (rollout.protocol=openai)."
        )


def _listed(value: Any, what: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a list, each with its path for error messages."""
    found = [(f"{what}[{place}]", item) for place, item in enumerate(read_items(value, what))]
    return [(place, read_mapping(item, place)) for place, item in found]
