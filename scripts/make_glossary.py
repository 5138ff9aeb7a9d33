"""Write docs/glossary.md from the table of fields, or check that it is up to date.

python scripts/make_glossary.py            write it
python scripts/make_glossary.py --check    exit 1 when it is stale
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.protocol.fields import DIMS, FIELDS, Field

PAGE = Path(__file__).resolve().parents[1] / "docs" / "glossary.md"

LETTERS = {**DIMS, "V": "vocabulary", "D": "hidden size of the model"}

TERMS = {
    "actor": "the policy: one set of weights that both trains and generates",
    "batch": "the rows of one training step: prompts per step times group size",
    "critic": "a backbone with a value head that estimates the reward still to come",
    "description": "a frozen dataclass made by `@component`, named by `_target_`, that says what a component is; "
    "`build(context)` makes it",
    "driver": "the process that runs the algorithm as straight-line code and calls the roles",
    "field": "a named tensor of a batch, with a contract in the table above",
    "group": "the responses to one prompt within one step",
    "mini-batch": "the rows that one optimizer step uses",
    "micro-batch": "the rows that go through the model at once; its size changes nothing but memory and rounding",
    "off the mask": "where `response_mask` is False: padding, and tokens that the policy did not choose",
    "producer": "the function that made a field, named in errors by its file and line",
    "reference": "the frozen policy that the KL penalty measures the distance to",
    "role": "an actor, critic, reference or reward behind one interface, in this process or another",
    "rollout": "sampling responses to prompts, with their log-probabilities",
    "score": "what the reward function gave; the reward is the score less the KL penalty",
    "step": "one round of generation, scoring, credit and updates",
    "strict check": "checks of content, not of shapes alone; on with `VERL_STRICT_DATA_CHECK=1`",
}


def page() -> str:
    """The whole text of the glossary."""
    letters = [f"| **{letter}** | {meaning} |" for letter, meaning in LETTERS.items()]
    terms = [f"| {term} | {meaning} |" for term, meaning in sorted(TERMS.items())]
    return "\n".join(
        [
            "# Glossary",
            "",
            "Written by `python scripts/make_glossary.py` from `verl/protocol/fields.py`; change it there.",
            "",
            "## Shape letters",
            "",
            "Index `[b, t]` of a response tensor always belongs to response token t.",
            "",
            "| letter | meaning |",
            "|---|---|",
            *letters,
            "",
            "## Fields of a batch",
            "",
            "Names of your own are free; `verl.protocol.fields.register(Field(...))` has them checked and re-padded "
            "too.",
            "`padding` fills the places added when batches of other lengths are joined.",
            "",
            "| field | shape | dtype | unit | padding | meaning | made by |",
            "|---|---|---|---|---|---|---|",
            *map(_row, FIELDS.values()),
            "",
            "## Terms",
            "",
            "| term | meaning |",
            "|---|---|",
            *terms,
            "",
        ]
    )


def _row(field: Field) -> str:
    pad = "pad token" if field.pad == "pad_token" else field.pad
    cells = [f"`{field.name}`", f"`{field.shape}`", field.dtype, field.unit, str(pad), field.meaning, field.producer]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when the page is stale")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page lies (default: docs/glossary.md)")
    options = parser.parse_args(arguments)
    if not options.check:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page(), encoding="utf-8")
        print(f"wrote {options.page}")
        return 0
    if options.page.is_file() and options.page.read_text(encoding="utf-8") == page():
        return 0
    print(f"{options.page} is stale: run python scripts/make_glossary.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
