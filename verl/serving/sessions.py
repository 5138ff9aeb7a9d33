"""Sessions of the endpoint: the requests of one agent program, for one sample of one prompt."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import Counter
from collections.abc import Sequence

from verl.errors import ConfigError
from verl.serving.conversations import KnownConversations, RecordedTurn


class Session:
    """The requests of one program, for one sample of one prompt.

    The noise of a request is keyed by (prompt, sample, all tokens before the turn, its `seed`, how often that was asked
    before), so that requests which a program makes side by side draw the same tokens in any order.

    Args:
        max_turns: requests that are answered.
    Attributes:
        recorded: the turns that were answered, in that order.
        cut: the limit by which a request was refused, or empty.
    """

    def __init__(self, prompt_id: int, sample_id: int, max_turns: int):
        self.prompt_id, self.sample_id, self.max_turns = prompt_id, sample_id, max_turns
        self.known = KnownConversations()
        self.recorded: list[RecordedTurn] = []
        self.cut = ""
        self.is_closed = False
        self._asked: Counter[tuple[bytes, int | None]] = Counter()
        self._num_asked = 0
        self._lock = threading.Lock()

    def turn_key(self, ids: Sequence[int], seed: int | None) -> int:
        """Noise key of the next turn.

        Raises:
            ConfigError: the session has ended, or has had all of its turns.
        """
        with self._lock:
            if self.is_closed:
                raise ConfigError("the session has ended")
            if self._num_asked >= self.max_turns:
                self.cut = "turns"
                raise ConfigError(f"the episode has had its {self.max_turns} turns (environment.max_turns)")
            self._num_asked += 1
            digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).digest()
            number = self._asked[digest, seed]
            self._asked[digest, seed] += 1
        key = hashlib.blake2b(digest + repr((seed, number)).encode(), digest_size=4).digest()
        return int.from_bytes(key) >> 1
