"""The protocol of `POST /v1/completions` with token ids both ways, as vLLM speaks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.http_client.request import NotRetryable, RetryableAnswer
from verl.rollout.server import values
from verl.rollout.server.protocol import Drawn, Protocol, Wish, checked

TOKEN_ID = "token_id:"  # vLLM writes a token so where it is asked for ids in place of text
TEXT_ONLY = (
    "text without token ids. Training needs the very tokens that were drawn, and a text can be cut into tokens in many "
    "ways: use a server that gives them, such as vLLM (return_token_ids)"
)


class OpenAI(Protocol):
    """Sends every setting of sampling, since a server takes what is left out from the model's generation config."""

    path = "/v1/completions"
    takes_ids = True

    def __init__(self, model: str):
        self.model = model

    def body(self, prompt: Sequence[int], wish: Wish) -> dict[str, Any]:
        asked = {
            "model": self.model,
            "prompt": list(prompt),
            "n": 1,
            "max_tokens": wish.max_tokens,
            "min_tokens": wish.min_tokens,
            "temperature": 0.0 if wish.greedy else wish.temperature,
            "top_k": 0 if wish.greedy else wish.top_k,
            "top_p": 1.0 if wish.greedy else wish.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(wish.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        if wish.seed is not None:
            asked["seed"] = wish.seed
        if wish.tells_prompt:
            asked["prompt_logprobs"] = 0
        return asked

    def read(self, answer: Any, prompt: Sequence[int], wish: Wish) -> Drawn:
        choice = _only_choice(answer)
        reason = values.reason(choice["finish_reason"], "choices[0].finish_reason", ("stop", "length"))
        told = values.mapping(choice.get("logprobs") or {}, "choices[0].logprobs")
        ids = _ids_of(choice, told, wish)
        if (log_probs := told.get("token_logprobs")) is None or (isinstance(log_probs, list) and None in log_probs):
            raise NotRetryable("tokens without log-probs, which training needs")
        log_probs = values.log_probs(log_probs, "choices[0].logprobs.token_logprobs")
        if (seen := choice.get("prompt_token_ids")) is not None and seen != list(prompt):
            raise NotRetryable("another prompt than was sent: it changes token ids")
        of_prompt = _of_prompt(choice.get("prompt_logprobs"), prompt) if wish.tells_prompt else None
        return checked(Drawn(ids, log_probs, of_prompt), reason == "length", wish)


def _only_choice(answer: Any) -> dict[str, Any]:
    """The one response that was asked for (`n` is 1)."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices:
        raise RetryableAnswer("an answer without choices[0].finish_reason")
    if len(choices) > 1:
        raise RetryableAnswer(f"{len(choices)} choices, where one response was asked for (n is 1)")
    choice = choices[0]
    if not isinstance(choice, dict) or "finish_reason" not in choice:
        raise RetryableAnswer("an answer without choices[0].finish_reason")
    if (index := choice.get("index", 0)) != 0 or isinstance(index, bool):
        raise RetryableAnswer(f"choices[0].index is {values.shown(index)}, where one response was asked for (n is 1)")
    return choice


def _ids_of(choice: dict[str, Any], told: dict[str, Any], wish: Wish) -> list[int]:
    """The tokens: `token_ids`, the texts `token_id:N` in their place, or both, which must then be the same."""
    given, written = choice.get("token_ids"), _written_ids(told.get("tokens"))
    if not given and written is None:
        raise NotRetryable(TEXT_ONLY)
    ids = values.token_ids(given or written, "choices[0].token_ids", wish.num_tokens)
    if written is not None and written != ids:
        raise RetryableAnswer(f"token_ids {values.shown(ids)}, whose log-probs are of tokens {values.shown(written)}")
    return ids


def _written_ids(tokens: Any) -> list[int] | None:
    """Ids from `["token_id:17", ...]`; None where texts stand there."""
    is_list = isinstance(tokens, list) and tokens
    if not is_list or not all(isinstance(token, str) and token.startswith(TOKEN_ID) for token in tokens):
        return None
    numbers = [token.removeprefix(TOKEN_ID) for token in tokens]
    if wrong := [number for number in numbers if not (number.isascii() and number.isdigit() and len(number) < 19)]:
        raise RetryableAnswer(
            f"choices[0].logprobs.tokens has {values.shown(TOKEN_ID + wrong[0])}, which names no token"
        )
    return [int(number) for number in numbers]


def _of_prompt(told: Any, prompt: Sequence[int]) -> list[float] | None:
    """From `[null, {"17": {"logprob": -1.5}}, ...]`, one mapping for each token of the prompt; None without any."""
    if told is None:
        return None
    found = []
    if len(values.items(told, "choices[0].prompt_logprobs")) != len(prompt):
        raise RetryableAnswer(f"{len(told)} prompt_logprobs for a prompt of {len(prompt)} tokens")
    for place, token in enumerate(prompt):
        what = f"choices[0].prompt_logprobs[{place}]"
        if place == 0:
            continue  # nothing predicts it
        entry = values.mapping(told[place], what).get(str(token))
        if entry is None:
            raise RetryableAnswer(f"{what} has no log-prob of the prompt's own token {token}")
        found.append(values.log_prob(values.mapping(entry, what).get("logprob"), what))
    return found
