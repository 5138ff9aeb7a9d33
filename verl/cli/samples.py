"""`verl samples`: browse the rollouts of a run, as a table or as JSON.

Rows come from the replay buffer of the run and from its sample tables. `verl report` has the latter as a page.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Annotated, Any

import typer

from verl.cli.console import echo, print_json
from verl.cli.report.samples import EPISODE, OF_BUFFER, DumpedSample, read_samples
from verl.errors import ConfigError, end_cut
from verl.tracking.console import print_table, visible

WIDTH = 60  # width of a text if the output has none
CUT = "..."
SORTS: dict[str, Callable[[DumpedSample], float]] = {
    "step": lambda sample: sample.step,
    "reward": lambda sample: float("-inf") if sample.score is None else sample.score,
    "length": lambda sample: -1 if sample.length is None else sample.length,
}


def within(option: str, text: str, value_of: Callable[[DumpedSample], float | None]) -> Callable[[DumpedSample], bool]:
    """Make a test from a range such as `0.5:1`, `0.5:`, `:1` or `1`; a row without the value fails it.

    Raises:
        ConfigError: the text is not a range.
    """
    low, colon, high = text.partition(":")
    try:
        least = float(low) if low else float("-inf")
        most = (float(high) if high else float("inf")) if colon else least
    except ValueError:
        raise ConfigError(f"{option} is {text!r}: expected a range such as 0.5:1, 0.5: or :1, or one number.") from None
    return lambda sample: (value := value_of(sample)) is not None and least <= value <= most


def samples(
    run: Annotated[
        str, typer.Argument(help="A run directory, a checkpoint, the address of one in object storage, or latest.")
    ],
    reward: Annotated[str | None, typer.Option(help="Range of scores: 0.5:1, 0.5: or :0.5.")] = None,
    length: Annotated[str | None, typer.Option(help="Range of tokens of the response.")] = None,
    step: Annotated[str | None, typer.Option(help="Range of steps: 10:20, or 10.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text that the prompt contains.")] = None,
    prompt_id: Annotated[int | None, typer.Option(help="Number of the prompt, for rows of the replay buffer.")] = None,
    source: Annotated[str | None, typer.Option(help="buffer, or a table of samples such as eval.")] = None,
    sort: Annotated[str, typer.Option(help="step, reward or length; -reward for the largest first.")] = "step",
    limit: Annotated[int, typer.Option(help="Rows shown; 0 for all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON.")] = False,
    turns: Annotated[bool, typer.Option("--turns", help="Episodes turn by turn.")] = False,
) -> None:
    """Browse the rollouts of a run: its sample tables and its replay buffer."""
    ranges = (("reward", "score", reward), ("length", "length", length), ("step", "step", step))
    tests = [within(f"--{name}", text, attrgetter(field)) for name, field, text in ranges if text is not None]
    equal = [(name, x) for name, x in (("prompt_id", prompt_id), ("source", source)) if x is not None]
    if (key := SORTS.get(sort.removeprefix("-"))) is None:
        raise ConfigError(f"--sort is {sort!r}: expected {', '.join(SORTS)}, with - before it for the largest first.")
    passing = (
        sample
        for sample in read_samples(run)
        if all(test(sample) for test in tests)
        if all(getattr(sample, name) == x for name, x in equal)
        if prompt is None or prompt in sample.prompt
    )
    selected = sorted(passing, key=key, reverse=sort.startswith("-"))
    shown = selected[:limit] if limit else selected
    if as_json:
        print_json([sample.as_json() for sample in shown])
    elif turns:
        _print_turns(shown)
    else:
        _print_samples(shown)
        echo(f"{len(shown)} of {len(selected)} rows" + ("" if len(shown) == len(selected) else " (--limit)"))


def _print_samples(shown: Sequence[DumpedSample]) -> None:
    """Print a table as wide as the terminal: numbers, prompt, response, and the columns of the data."""
    table = {
        "step": [str(sample.step) for sample in shown],
        "source": [sample.source for sample in shown],
        "prompt id": [_number(sample.prompt_id) for sample in shown],
        "reward": [_number(sample.score) for sample in shown],
        "tokens": [_number(sample.length) for sample in shown],
    }
    table = {name: cells for name, cells in table.items() if any(cells)}
    texts = {"prompt": [_line(sample.prompt) for sample in shown]}
    texts["response"] = [_line(sample.response) for sample in shown]
    for name in data_columns(shown):
        texts[name] = [_line(sample.others.get(name, "")) for sample in shown]
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        texts = {name: [end_cut(cell, WIDTH) for cell in cells] for name, cells in texts.items()}
    table |= texts
    print_table(list(table), list(zip(*table.values(), strict=True)), cut=list(texts))


def _print_turns(shown: Sequence[DumpedSample]) -> None:
    """Print episodes turn by turn, with rewards and times of tool calls."""
    episodes = [sample for sample in shown if isinstance(sample.others.get(EPISODE), dict)]
    if not episodes:
        raise ConfigError("--turns: none of the selected rows is an episode. Runs with an environment write episodes.")
    for sample in episodes:
        try:
            record, rows = sample.others[EPISODE], list(_turn_rows(sample))
            end = f"ended by {record['end']}  {len(record['turns'])} turns  {record['seconds']:.3g} s"
        except (LookupError, TypeError, ValueError, AttributeError):
            echo(f"step {sample.step}  {sample.source}  its turns are damaged, and are left out")
            continue
        echo(f"step {sample.step}  {sample.source}  reward {_number(sample.score)}  {end}")
        print_table(["turn", "who", "text", "reward", "calls"], rows)
        echo("")


def _turn_rows(sample: DumpedSample) -> Iterator[list[str]]:
    record = sample.others[EPISODE]
    yield ["", "prompt", _line(sample.prompt), "", ""]
    for number, turn in enumerate(record["turns"]):
        cut = "" if turn["is_complete"] else f"{CUT} cut"
        reward = f"{turn['reward']:g}" if turn["reward"] else ""
        yield [str(number), "model", _line(turn["text"]) + cut, reward, ""]
        calls = ", ".join(f"{c['name'] or 'unread call'} {c['outcome']} {c['seconds']:.3g} s" for c in turn["calls"])
        if turn["observation"] is not None:
            yield ["", "environment", _line(observation_text(turn["observation"])), "", calls]


def observation_text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(str(message.get("content", "")) for message in observation)


def data_columns(samples: Sequence[DumpedSample]) -> list[str]:
    """Columns of the data, such as `answer`."""
    hidden = (*OF_BUFFER, EPISODE)
    return [name for name in dict.fromkeys(key for sample in samples for key in sample.others) if name not in hidden]


def _line(value: Any) -> str:
    """A value on one line, with control characters escaped."""
    return visible(" ".join(str("" if value is None else value).split()))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, int) else f"{value:.3g}"
