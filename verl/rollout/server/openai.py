"""The protocol of `POST /v1/completions` with token ids both ways, as vLLM speaks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.remote.asking import Unfit, Unusable
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
        try:
            choice = answer["choices"][0]
            reason = choice["finish_reason"]
        except (LookupError, TypeError):
            raise Unusable("an answer without choices[0].finish_reason") from None
        if reason not in ("stop", "length"):
            raise Unusable(f"a response that was broken off (finish_reason {reason})")
        told = choice.get("logprobs") or {}
        log_probs = told.get("token_logprobs")
        ids = choice.get("token_ids") or _ids_in(told.get("tokens"))
        if ids is None:
            raise Unfit(TEXT_ONLY)
        if log_probs is None or None in log_probs:
            raise Unfit("tokens without log-probs, which training needs")
        if (seen := choice.get("prompt_token_ids")) is not None and list(seen) != list(prompt):
            raise Unfit("another prompt than was sent: it changes token ids")
        drawn = Drawn(list(ids), [float(x) for x in log_probs], _of_prompt(choice.get("prompt_logprobs"), prompt))
        return checked(drawn, reason == "length", wish)


def _ids_in(tokens: Any) -> list[int] | None:
    if not tokens or not all(isinstance(token, str) and token.startswith(TOKEN_ID) for token in tokens):
        return None
    return [int(token.removeprefix(TOKEN_ID)) for token in tokens]


def _of_prompt(told: Any, prompt: Sequence[int]) -> list[float] | None:
    """From `[null, {"17": {"logprob": -1.5}}, ...]`, one mapping for each token of the prompt."""
    if not isinstance(told, list) or len(told) != len(prompt):
        return None
    try:
        return [float(at[str(token)]["logprob"]) for token, at in zip(prompt[1:], told[1:], strict=True)]
    except (LookupError, TypeError):
        return None
