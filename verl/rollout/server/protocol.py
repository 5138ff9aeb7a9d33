"""What a server is asked for and gives, whatever the protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.http_client.request import NotRetryable, Request, RetryableAnswer


@dataclass(frozen=True)
class Wish:
    """How one response is to be drawn.

    Attributes:
        max_tokens, min_tokens: of the response.
        greedy: the likeliest token each time; `temperature`, `top_k` and `top_p` are then not used.
        seed: of this response; None: the server's own.
        stop_ids: tokens that end it, and belong to it.
        tells_prompt: whether log-probs of the prompt's tokens are wanted too.
        num_tokens: that the actor's model knows; a response holds ids below it. None where that is not known.
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
class Drawn:
    """One response.

    Attributes:
        ids: its tokens, the one that ended it included.
        log_probs: of each, as the server means them.
        prompt_log_probs: of each token of the prompt but the first, where they were wished for and can be had.
    """

    ids: list[int]
    log_probs: list[float]
    prompt_log_probs: list[float] | None = None


class Protocol(ABC):
    """How one kind of server is spoken to.

    Attributes:
        path: of a request for a response.
        takes_ids: whether prompts go there as token ids, and not as text.
    """

    path: str
    takes_ids: bool

    @abstractmethod
    def body(self, prompt: Sequence[int], wish: Wish) -> dict[str, Any]:
        """The request for one response to a prompt."""

    @abstractmethod
    def read(self, answer: Any, prompt: Sequence[int], wish: Wish) -> Drawn:
        """The response.

        Raises:
            Unusable: it has none; Unfit where this server never will.
        """


class Draw(Request):
    """One response, on its way.

    Attributes:
        drawn: once it is there.
    """

    def __init__(self, protocol: Protocol, prompt: Sequence[int], wish: Wish):
        self.path, self.protocol, self.prompt, self.wish = protocol.path, protocol, prompt, wish
        self.drawn: Drawn | None = None

    def body(self) -> Any:
        return self.protocol.body(self.prompt, self.wish)

    def read(self, answer: Any) -> None:
        self.drawn = self.protocol.read(answer, self.prompt, self.wish)


def checked(drawn: Drawn, was_cut: bool, wish: Wish) -> Drawn:
    """The response, whose values were read by `verl.rollout.server.values`, if it is one that was wished for.

    Args:
        was_cut: whether it ended for its length, and not by a stop token.
    Raises:
        Unusable: it is broken off, or has another number of log-probs than of tokens.
        Unfit: it ended by something that does not end a response here.
    """
    ids, log_probs = drawn.ids, drawn.log_probs
    if not ids or len(ids) > wish.max_tokens or (was_cut and len(ids) < wish.max_tokens):
        raise RetryableAnswer(f"a response of {len(ids)} tokens, where {wish.max_tokens} were asked for")
    if len(log_probs) != len(ids):
        raise RetryableAnswer(f"{len(log_probs)} log-probs for {len(ids)} tokens")
    if not was_cut and ids[-1] not in wish.stop_ids:
        raise NotRetryable(
            f"a response that ended with token {ids[-1]}, which ends none here. Add it to stop_token_ids."
        )
    return drawn
