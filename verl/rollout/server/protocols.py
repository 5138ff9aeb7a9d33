"""Protocols of inference servers: OpenAI-compatible `POST /v1/completions` and TGI's `POST /generate`.

`ServerProtocol` is the interface; `SamplingRequest` and `ServerResponse` are the same for both. `parsed` reads a
server's JSON as a pydantic model, whose fields are `TokenId` and `LogProb` where they stand for these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError, ValidationInfo

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


def _token_id(number: int, info: ValidationInfo) -> int:
    if number < 0 or (info.context is not None and number >= info.context):
        known = "not negative" if info.context is None else f"0 to {info.context - 1}"
        raise ValueError(f"ids of the actor's model are {known}")
    return number


def _log_prob(number: float) -> float:
    if (fault := log_prob_fault(number)) is not None:
        if number > 0:
            raise NotRetryable(f"a log-prob of {fault}")
        raise ValueError(f"a log-prob of {fault}")
    return number


TokenId = Annotated[int, AfterValidator(_token_id)]  # of the actor's model
LogProb = Annotated[float, AfterValidator(_log_prob)]  # of a sampled token: finite, at most `LARGEST_LOG_PROB`
Answer = TypeVar("Answer", bound=BaseModel)


def parsed(model: type[Answer], answer: Any, sampling_params: SamplingRequest) -> Answer:
    """A server's answer as this model, without conversion of values.

    Raises:
        RetryableAnswer: it has another form, with the path and the value. NotRetryable: a log-prob above 0.
    """
    try:
        return model.model_validate(answer, strict=True, context=sampling_params.num_tokens)
    except ValidationError as error:
        fault = error.errors()[0]
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in fault["loc"]).lstrip(".")
        shown = repr(fault["input"])
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]} ..."
        raise RetryableAnswer(
            f"{path or 'the answer'} is {shown}: {fault['msg'].removeprefix('Value error, ')}"
        ) from None


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
        (choice,) = parsed(_Completion, answer, sampling_params).choices
        log_probs = None if choice.logprobs is None else choice.logprobs.token_logprobs
        if not choice.token_ids:
            raise NotRetryable(TEXT_ONLY)
        if log_probs is None or None in log_probs:
            raise NotRetryable("tokens without log-probs, which training needs")
        if choice.prompt_token_ids not in (None, list(prompt)):
            raise NotRetryable("another prompt than was sent: it changes token ids")
        of_prompt = None
        if sampling_params.tells_prompt and (told := choice.prompt_logprobs) is not None:
            own = [(tokens or {}).get(str(token)) for token, tokens in zip(prompt, told, strict=False)]
            of_prompt = [token.logprob for token in own[1:] if token is not None]  # nothing predicts the first
            if len(told) != len(prompt) or len(of_prompt) != len(prompt) - 1:
                raise RetryableAnswer("choices[0].prompt_logprobs are not of the prompt's own tokens")
        response = ServerResponse(choice.token_ids, [x for x in log_probs if x is not None], of_prompt)
        return checked(response, choice.finish_reason == "length", sampling_params)


class _PromptToken(BaseModel):
    logprob: LogProb


class _TokenLogProbs(BaseModel):
    token_logprobs: list[LogProb | None] | None = None


class _Choice(BaseModel):
    finish_reason: Literal["stop", "length"]
    token_ids: list[TokenId] | None = None
    logprobs: _TokenLogProbs | None = None
    prompt_token_ids: Any = None
    prompt_logprobs: list[dict[str, _PromptToken] | None] | None = None  # null, {"17": {"logprob": -1.5}}, ...


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]  # `n` is 1


class _Token(BaseModel):
    id: TokenId
    logprob: LogProb


class _PrefillToken(BaseModel):
    id: int
    logprob: LogProb | None = None


class _Details(BaseModel):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    tokens: list[_Token]
    generated_tokens: int | None = None
    prefill: list[_PrefillToken] | None = None


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
        if not isinstance(answer, dict) or not answer.get("details"):
            raise NotRetryable("an answer without details, which hold the tokens: is it TGI's /generate?")
        details = parsed(_Details, answer["details"], sampling_params)
        tokens, prefill = details.tokens, details.prefill or []
        response = ServerResponse([token.id for token in tokens], [token.logprob for token in tokens])
        if details.generated_tokens not in (None, len(tokens)):
            raise RetryableAnswer(f"generated_tokens is {details.generated_tokens}, and tokens has {len(tokens)}")
        if sampling_params.tells_prompt and prefill:
            if (seen := [token.id for token in prefill]) != list(prompt):
                raise NotRetryable(
                    f"its tokenizer reads a prompt as {seen}, the actor's as {list(prompt)}: another model"
                )
            told = [token.logprob for token in prefill[1:] if token.logprob is not None]
            response = replace(response, prompt_log_probs=told if len(told) == len(prompt) - 1 else None)
        return checked(response, details.finish_reason == "length", sampling_params)

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
