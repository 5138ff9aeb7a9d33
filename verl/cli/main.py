"""The console command `verl`, and `verl env` with the execution paths of model families."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import verl
from verl.cli import checkpoint, train
from verl.cli.console import echo, one_line_errors
from verl.cli.generate import evaluate, generate, serve_policy
from verl.cli.plan import plan
from verl.cli.report.watch import report, watch
from verl.cli.resume_check import resume_check
from verl.cli.runs import diff, lineage, runs
from verl.cli.serve_training import serve_training
from verl.compose.schema import ROOTS
from verl.errors import ConfigError
from verl.model_paths.families import family_table, summaries
from verl.tracking.console import print_table
from verl.utils.child_process.interpreter import run_main
from verl.utils.env_check import BACKENDS, check_env
from verl.utils.redact import redact_output
from verl.utils.signals import component_exits, orderly_termination

FAMILIES_WIDTH = 80


def print_families(names: Sequence[str] = ()) -> None:
    """Print the execution paths of some families, or of all.

    Raises:
        ConfigError: a family is not in the table.
    """
    known = family_table().families
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise ConfigError(
                f"family is {name!r}: no model of this model_type was tried, so it takes plain paths."
                + (f" Did you mean {' or '.join(near)}?" if near else "")
            )
    chosen = [summary for summary in summaries() if not names or summary.family in names]
    rows = [(summary.name, summary.status, summary.scoring or summary.note, summary.decoding) for summary in chosen]
    print_table(("model", "", "scoring", "decoding"), rows, width=FAMILIES_WIDTH)


class _Commands(TyperGroup):
    """A command group whose errors are one line and an exit status, which a component's `exit()` does not determine.

    The commands that train handle errors, exits, signals and threads themselves (`entry_point` in compose/launch.py).
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["trains"] = args[:1] == ["quickstart"] or args[:1] in [[root.command] for root in ROOTS.values()]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        if ctx.meta["trains"]:
            return super().invoke(ctx)
        with component_exits(), one_line_errors(), orderly_termination():
            return super().invoke(ctx)


app = typer.Typer(
    name="verl", cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command()(train.quickstart)
for root in ROOTS.values():
    app.command(root.command, cls=train.HydraCommand, help=train.help_of(root))(train.command_of(root))
app.add_typer(checkpoint.app)
app.command("resume-check")(resume_check)
app.command()(lineage)
app.command()(runs)
app.command()(diff)
app.command("eval")(evaluate)
app.command()(generate)
app.command("serve-policy")(serve_policy)
app.command("serve-training")(serve_training)
app.command()(plan)
app.command()(report)
app.command()(watch)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        echo(verl.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models."""


@app.command()
def env(
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", "-b", help=f"Check the interface of this backend too: {', '.join(BACKENDS)}."),
    ] = None,
    models: Annotated[
        bool, typer.Option("--models", help="List the execution paths of model families; with FAMILY, of those.")
    ] = False,
    family: Annotated[
        list[str] | None, typer.Argument(help="With --models: a model_type of transformers, such as llama.")
    ] = None,
) -> None:
    """Check that everything verl needs is installed; the exit status is 1 if something is not."""
    if family and not models:
        raise typer.BadParameter("FAMILY needs --models.", param_hint="FAMILY")
    if models:
        print_families(family or ())
        return
    met = check_env(*([backend] if backend else []), exit_on_failure=False)
    counts = Counter(summary.status.partition(" up to")[0] for summary in summaries())
    words = ", ".join(f"{counts[status]} {status}" for status in ("fast", "plain", "refused", "not built"))
    echo(f"    model families: {words}; see verl env --models")
    raise typer.Exit(0 if met else 1)


def run() -> NoReturn:
    """Entry point of `verl` and `python -m verl.cli`."""
    redact_output()
    run_main(lambda: app(prog_name="verl"))
