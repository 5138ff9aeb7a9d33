"""Settings that a user has changed and that the run never reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

WARMUP = ("actor.optimizer.warmup_updates", "critic.optimizer.warmup_updates")


def unused_settings(run: Any, changed: Sequence[str]) -> str | None:
    """One line about changed settings without effect; None if all have one.

    Args:
        run: a `PPORun` or an `SFTRun`.
        changed: configuration paths that differ from the defaults.
    """
    sentences = []
    for beginning, reason in _unread(run):
        if paths := [path for path in changed if path == beginning or path.startswith(f"{beginning}.")]:
            sentences.append(f"{', '.join(paths)} ({reason})")
    return f"Settings without effect in this run: {'; '.join(sentences)}." if sentences else None


def _unread(run: Any) -> Iterator[tuple[str, str]]:
    """Paths that are not read, and below which nothing is, each with the reason."""
    settings, algorithm, saving = run.trainer, getattr(run, "algorithm", None), run.checkpoint
    if settings.safety.spike_factor is None:
        reason = "trainer.safety.spike_factor is null"
        yield from ((f"trainer.safety.{name}", reason) for name in ("spike_history", "spike_window", "watched"))
    if saving is not None and saving.keep_best is None and saving.save_best is None:
        yield "checkpoint.best_mode", "checkpoint.keep_best and save_best are null"
    if settings.total_steps is not None:
        updates = settings.total_steps * (1 if algorithm is None else run.updates_per_step)
        for path in WARMUP:
            role = getattr(run, path.partition(".")[0], None)
            if role is not None and role.optimizer.warmup_updates >= updates:
                yield path, f"the run has {updates} updates, all of them in the warm-up: the rate stays below lr"
    if algorithm is None:
        return
    if not algorithm.needs_values:
        reason = f"{type(algorithm.advantage).__name__} needs no critic"
        yield from (("critic", reason), ("algorithm.value_loss", reason))
    if not algorithm.needs_reference:
        yield "reference", "algorithm.kl needs none"
    if not algorithm.replay_fraction:
        reason = "algorithm.replay_fraction is 0"
        yield from (("replay", reason), ("algorithm.replay_max_staleness", reason))
    if run.updates_per_step == 1:
        clips = ("clip", "clip_low", "clip_high", "dual_clip")
        reason = "with one update per batch the ratio of probabilities is 1"
        yield from ((f"algorithm.policy_loss.{name}", reason) for name in clips)
        if algorithm.needs_values:
            yield "algorithm.value_loss.clip", "with one update per batch values are those before it"
