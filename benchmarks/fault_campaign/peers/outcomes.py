"""What a resume does after a fault, and how often.

After a case, against the newest step whose save had returned, it

    whole              goes on from that step, or the one whose save was struck, with every bit of it
    older              goes on from an earlier step, and says nothing
    other values       goes on with values that no step had, and says nothing
    said               one of these two, with a warning
    stopped            raises; somebody has to find out which checkpoint is good
    nothing            finds no checkpoint
    claimed            one of these three, after a save that returned although a call of it had failed

A silent loss is `older`, `other values` or `claimed`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from peers.held import Found
from peers.training import Resumed

OUTCOMES = ["whole", "older", "other values", "said", "stopped", "nothing", "claimed"]
SILENT = {"older", "other values", "claimed"}


@dataclass(frozen=True)
class Known:
    """What a resume gives after each save that nothing happened to."""

    steps: dict[int, Found]

    def outcome(self, found: Found, promised: int) -> str:
        """See the list above."""
        if found.error is not None:
            return "stopped"
        if found.resumed is None:
            return "nothing"
        same = [step for step, known in self.steps.items() if known.resumed == found.resumed]
        if same and same[0] >= promised:
            return "whole"
        if set(found.said) - {sentence for known in self.steps.values() for sentence in known.said}:
            return "said"
        return "older" if same else "other values"

    def differing(self, found: Resumed) -> list[str]:
        """The parts that are not those of the step that they are said to be of."""
        known = self.steps.get(found.step)
        if known is None or known.resumed is None:
            return ["step"]
        return [name for name, digest in found.parts.items() if known.resumed.parts.get(name) != digest]


@dataclass
class Tally:
    """What came out for one tool."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    parts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def silent(self) -> dict[str, int]:
        """Silent losses of every group."""
        return {group: sum(counts[outcome] for outcome in SILENT) for group, counts in self.counts.items()}

    def add(self, group: str, case: str, outcome: str, is_claimed: bool, found: Found, known: Known) -> None:
        """One case.

        Args:
            is_claimed: the save returned although a call had failed.
        """
        if is_claimed and outcome in ("said", "stopped", "nothing"):
            outcome = "claimed"
        self.counts[group][outcome] += 1
        if outcome == "other values" and found.resumed:
            self.parts[" ".join(known.differing(found.resumed)) or "mixed"] += 1
        if outcome != "whole" and len(self.examples[outcome]) < 3:
            self.examples[outcome].append(f"{case}: {found.error or found.said or ''}"[:300])
