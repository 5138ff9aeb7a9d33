"""`verl samples`: browse the rollouts of a run, as a table, one prompt across steps, as JSON, or as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from verl.cli.output import one_line_errors, print_json, print_table
from verl.cli.samples_page import page
from verl.cli.samples_read import Sample, chosen, read_samples, within
from verl.errors import ConfigError

WIDTH = 60  # of a text in the table
SORTS: dict[str, Callable[[Sample], float]] = {
    "step": lambda sample: sample.step,
    "reward": lambda sample: float("-inf") if sample.score is None else sample.score,
    "length": lambda sample: -1 if sample.length is None else sample.length,
}


def samples(
    run: Annotated[str, typer.Argument(help="The directory of a run, or a checkpoint, or one's address in a store.")],
    reward: Annotated[str | None, typer.Option(help="Range of scores: 0.5:1, 0.5: or :0.5.")] = None,
    length: Annotated[str | None, typer.Option(help="Range of tokens of the response.")] = None,
    step: Annotated[str | None, typer.Option(help="Range of steps: 10:20, or 10.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text that the prompt contains.")] = None,
    prompt_id: Annotated[int | None, typer.Option(help="Number of the prompt; of rows of the buffer.")] = None,
    source: Annotated[str | None, typer.Option(help="buffer, or a table of samples such as eval.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="One prompt across steps: a line for each step.")] = False,
    sort: Annotated[str, typer.Option(help="step, reward or length; -reward for the largest first.")] = "step",
    limit: Annotated[int, typer.Option(help="Rows shown; 0 for all.")] = 20,
    html: Annotated[Path | None, typer.Option(help="Write one page with all chosen rows, to sort and filter.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON.")] = False,
) -> None:
    """Browse the rollouts of a run: the rows of its replay buffer, and the samples that it dumped."""
    with one_line_errors():
        tests = _tests(reward, length, step, prompt, prompt_id, source)
        found = _sorted(chosen(read_samples(run), tests), sort)
        shown = found[:limit] if limit else found
        if html is not None:
            html.write_text(page(found, f"Samples of {run}"), encoding="utf-8")
            typer.echo(f"{html}: {len(found)} rows")
        elif as_json:
            print_json([sample.as_json() for sample in shown])
        elif compare:
            _compare(found)
        else:
            head = ["step", "source", "prompt id", "reward", "tokens", "prompt", "response"]
            print_table(head, [_cells(sample) for sample in shown])
            typer.echo(f"{len(shown)} of {len(found)} rows" + ("" if len(shown) == len(found) else " (--limit)"))


def _tests(
    reward: str | None, length: str | None, step: str | None, prompt: str | None, number: int | None, source: str | None
) -> list[Callable[[Sample], bool]]:
    tests: list[Callable[[Sample], bool]] = []
    if reward is not None:
        tests.append(within("--reward", reward, lambda sample: sample.score))
    if length is not None:
        tests.append(within("--length", length, lambda sample: sample.length))
    if step is not None:
        tests.append(within("--step", step, lambda sample: sample.step))
    if prompt is not None:
        tests.append(lambda sample: prompt in sample.prompt)
    if number is not None:
        tests.append(lambda sample: sample.prompt_id == number)
    if source is not None:
        tests.append(lambda sample: sample.source == source)
    return tests


def _sorted(found: Sequence[Sample], sort: str) -> list[Sample]:
    key = SORTS.get(sort.removeprefix("-"))
    if key is None:
        raise ConfigError(f"--sort is {sort!r}: expected {', '.join(SORTS)}, with - before it for the largest first.")
    return sorted(found, key=key, reverse=sort.startswith("-"))


def _compare(found: Sequence[Sample]) -> None:
    """A line for each step of one prompt: how many responses, how good, how long, and the best of them."""
    prompts = list(dict.fromkeys(sample.prompt for sample in found))
    if len(prompts) != 1:
        few = ", ".join(repr(_short(prompt)) for prompt in prompts[:3])
        raise ConfigError(
            f"--compare needs one prompt, and {len(prompts)} are chosen ({few}{' ...' if len(prompts) > 3 else ''}). "
            "Choose one with --prompt TEXT or --prompt-id N."
        )
    typer.echo(f"prompt  {prompts[0]}")
    by_step: dict[int, list[Sample]] = {}
    for sample in found:
        by_step.setdefault(sample.step, []).append(sample)
    rows = []
    for step, group in sorted(by_step.items()):
        best = max(group, key=SORTS["reward"])
        scores = [sample.score for sample in group if sample.score is not None]
        lengths = [sample.length for sample in group if sample.length is not None]
        rows.append(
            [str(step), str(len(group)), _mean(scores), _number(best.score), _mean(lengths), _short(best.response)]
        )
    print_table(["step", "responses", "mean reward", "best", "mean tokens", "best response"], rows)


def _cells(sample: Sample) -> list[str]:
    numbers = [sample.prompt_id, sample.score, sample.length]
    texts = [_short(sample.prompt), _short(sample.response)]
    return [str(sample.step), sample.source, *map(_number, numbers), *texts]


def _mean(values: Sequence[float]) -> str:
    return _number(sum(values) / len(values) if values else None)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, int) else f"{value:.3g}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
