"""Finds the known name that a mistyped one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None where none comes close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def nearest_path(path: str, known: Iterable[str]) -> str | None:
    """The known config path most like `path`, in its last key above all: `trainer.lr` finds `actor.optimizer.lr`."""
    scored = ((_likeness(path, candidate), candidate) for candidate in known)
    score, best = max(scored, key=lambda pair: (pair[0], -len(pair[1])), default=(0.0, ""))
    return best if score >= 0.6 else None


def hint(found: str | None) -> str:
    """The sentence that offers what was found; empty where nothing was."""
    return f" Did you mean {found}?" if found else ""


def _likeness(path: str, candidate: str) -> float:
    whole = difflib.SequenceMatcher(None, path, candidate).ratio()
    last = difflib.SequenceMatcher(None, path.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1]).ratio()
    same_parent = path.rpartition(".")[0] == candidate.rpartition(".")[0]
    return 0.65 * last + 0.25 * whole + 0.1 * same_parent
