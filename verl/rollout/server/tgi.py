"""The protocol of `POST /generate` of Text Generation Inference (TGI): prompts as text, responses as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl.errors import RolloutError
from verl.http_client.request import NotRetryable, RetryableAnswer
from verl.rollout.server import values
from verl.rollout.server.protocol import Drawn, Protocol, Wish, checked

REASONS = ("length", "eos_token", "stop_sequence")  # why a response ends


class TGI(Protocol):
    """A prompt goes there as text, so only such prompts can be sent that its tokenizer, the actor's, reads back alike.

    Args:
        tokenizer: the actor's.
    """

    path = "/generate"
    takes_ids = False

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def body(self, prompt: Sequence[int], wish: Wish) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "max_new_tokens": wish.max_tokens,
            "do_sample": not wish.greedy,
            "return_full_text": False,
            "details": True,
            "decoder_input_details": wish.tells_prompt,
        }
        if not wish.greedy:
            parameters["temperature"] = wish.temperature
            if wish.top_k > 0:
                parameters["top_k"] = wish.top_k
            if wish.top_p < 1:  # it refuses 1 itself
                parameters["top_p"] = wish.top_p
        if wish.seed is not None:
            parameters["seed"] = wish.seed
        return {"inputs": self.as_text(prompt), "parameters": parameters}

    def read(self, answer: Any, prompt: Sequence[int], wish: Wish) -> Drawn:
        details = answer.get("details") if isinstance(answer, dict) else None
        if not isinstance(details, dict):
            raise NotRetryable("an answer without details, which hold the tokens: is it TGI's /generate?")
        if "finish_reason" not in details or "tokens" not in details:
            raise RetryableAnswer("an answer whose details hold no finish_reason and tokens with id and logprob")
        reason = values.reason(details["finish_reason"], "details.finish_reason", REASONS)
        tokens = _listed(details["tokens"], "details.tokens")
        ids = [values.token_id(token.get("id"), f"{what}.id", wish.num_tokens) for what, token in tokens]
        drawn = Drawn(ids, [values.log_prob(token.get("logprob"), f"{what}.logprob") for what, token in tokens])
        if (count := details.get("generated_tokens")) is not None and count != len(ids):
            raise RetryableAnswer(
                f"details.generated_tokens is {values.shown(count)}, and details.tokens has {len(ids)}"
            )
        prefill = _listed(details.get("prefill") or [], "details.prefill")
        if wish.tells_prompt and prefill:
            seen = [values.token_id(token.get("id"), f"{what}.id", None) for what, token in prefill]
            if seen != list(prompt):
                raise NotRetryable(
                    f"its tokenizer reads a prompt as {seen}, the actor's as {list(prompt)}: another model"
                )
            told = [values.log_prob(token.get("logprob"), f"{what}.logprob") for what, token in prefill[1:]]
            drawn = replace(drawn, prompt_log_probs=told)
        return checked(drawn, reason == "length", wish)

    def as_text(self, prompt: Sequence[int]) -> str:
        """The text that the tokenizer reads as this prompt; what it puts before every text is left out.

        Raises:
            RolloutError: there is none.
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
    """Objects of a list, each with its place in words."""
    found = [(f"{what}[{place}]", item) for place, item in enumerate(values.items(value, what))]
    return [(place, values.mapping(item, place)) for place, item in found]
