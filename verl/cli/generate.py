"""`verl eval` and `verl generate`: evaluates a saved policy or samples from it. Nothing is trained or written."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.cli.console import CONFIG_DIR, echo, print_table
from verl.errors import ConfigError, VerlError
from verl.storage.config import is_address
from verl.tracking.base import short
from verl.utils.directories import TemporaryDirectory

if TYPE_CHECKING:
    from verl.compose.load_policy import SavedPolicy

log = logging.getLogger(__name__)

PATH = typer.Argument(
    help="A checkpoint, a directory of them, a run, a Hugging Face directory, latest, or an address such as s3://..."
)
OVERRIDES = typer.Argument(help="Overrides of its configuration, such as reward=math or rollout.top_p=0.9.")
DATA = typer.Option(exists=True, dir_okay=False, help="A parquet or JSONL file that replaces the run's data.")


def evaluate(
    path: Annotated[str, PATH],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    data: Annotated[Path | None, DATA] = None,
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object instead of a table.")] = False,
) -> None:
    """Evaluate a saved policy on the evaluation data of its run, with the reward and sampling options of the run.

    Step, sampling noise and rows are those of the run, so the metrics equal those that it logged at that step.
    """
    from verl.compose.load_policy import root_of

    with faults_reported(), located(path) as saved, running(saved, root_of(saved), overrides or [], data) as trainer:
        if trainer.eval_data is None:
            raise ConfigError("the run has no evaluation data. Give --data FILE, or data.eval_files=[...].")
        if data is not None and saved.point is not None:
            _tell_overlap(saved, overrides or [], trainer)
        metrics, rows = trainer.evaluate(saved.step), len(trainer.eval_data)
    if as_json:
        origin = path if is_address(path) else str(saved.origin)
        source = {"actor": origin, "step": saved.step, "rows": rows}
        echo(json.dumps({**source, "metrics": metrics}, indent=2))
        return
    echo(f"{f'{path}, step {saved.step}' if is_address(path) else saved.description}, on {rows} rows")
    print_table(["metric", "value"], [[key, short(value)] for key, value in metrics.items()])


def generate(
    path: Annotated[str, PATH],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="A text to continue. Repeatable.")] = None,
    data: Annotated[Path | None, DATA] = None,
    config_dir: Annotated[Path | None, CONFIG_DIR] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each --prompt is a user message.")] = False,
    samples: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="Greedy decoding.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens of a response.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line: prompt, response, tokens.")] = False,
) -> None:
    """Print responses of a saved policy to prompts, to the rows of a file, or to the evaluation data of its run."""
    if prompt and data is not None:
        raise typer.BadParameter("give --prompt or --data, not both", param_hint="--prompt")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    settings = [f"rollout.{key}={value}" for key, value in options.items() if value is not None]
    with faults_reported(), TemporaryDirectory("verl-prompts-") as directory, located(path) as saved:
        if prompt:
            data = Path(directory) / "prompts.jsonl"
            asked = [[{"role": "user", "content": text}] if chat else text for text in prompt]
            data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
            settings.append("data.prompt_key=prompt")
        from verl.compose.load_policy import trained_on_texts

        unrated = ["reward=length"]  # a cheap reward: responses are not scored
        with running(saved, "ppo", [*unrated, *(overrides or []), *settings], data) as trainer:
            rows = _responses(trainer, samples, greedy)
            has_template = getattr(trainer.tokenizer, "chat_template", None) and not trained_on_texts(saved)
            if prompt and not chat and has_template:
                log.warning(
                    "Prompts were sent as plain texts, and the model has a chat template: add --chat to use it."
                )
    for row in rows:
        echo(json.dumps(row) if as_json else f"{row['prompt']}\n  -> {row['response']}")


def _tell_overlap(saved: SavedPolicy, overrides: Sequence[str], trainer: Any) -> None:
    """Warn of rows that the policy was trained on, by the data of its own run, and of rows that repeat others."""
    from verl.compose.load_policy import policy_run, root_of
    from verl.data.base import DataSplits, data_counts, duplicates_sentence

    is_of_file = re.compile(r"data(=|\.(?!_target_=))")  # a class of data that is named is that of the run
    of_run = [text for text in overrides if is_of_file.match(text) is None]
    counts = data_counts(DataSplits(train=trainer.eval_data))
    counts = {name.replace("train", "eval"): number for name, number in counts.items()}
    try:
        trained = policy_run(saved, root_of(saved), of_run).data.build(trainer.context).train
        counts["eval_rows_in_train"] = data_counts(DataSplits(trained, trainer.eval_data)).get("eval_rows_in_train", 0)
    except (ConfigError, OSError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        log.warning("Data: whether these rows were trained on is unknown: the data of the run is not read (%s)", reason)
    if (sentence := duplicates_sentence(counts)) is not None:
        log.warning("%s", sentence)


def _responses(trainer: Any, samples: int, greedy: bool) -> list[dict[str, Any]]:
    from verl.ops.sampling import EVALUATION
    from verl.rollout.base import GenerationRequest

    if trainer.eval_data is None:
        raise ConfigError("the run has no evaluation data. Give --prompt TEXT or --data FILE.")
    batch = trainer.eval_data.collate(range(len(trainer.eval_data)))
    rows = trainer.generate(batch, GenerationRequest(0, num_samples=samples, greedy=greedy, stream=EVALUATION))
    lengths = rows["response_mask"].sum(dim=1).tolist()
    texts = zip(rows["prompt_text"], rows["response_text"], lengths, strict=True)
    return [{"prompt": prompt, "response": response, "tokens": tokens} for prompt, response, tokens in texts]


@contextmanager
def located(path: str) -> Iterator[SavedPolicy]:
    """The policy at a path; for an address a temporary download."""
    from verl.compose.load_policy import locate_policy

    if not is_address(path):
        yield locate_policy(path)
        return
    from verl.checkpoint.remote.transfer import bring

    with TemporaryDirectory("verl-fetched-") as directory:
        yield locate_policy(str(bring(path, Path(directory))[0].directory))


@contextmanager
def running(
    saved: SavedPolicy,
    root: str,
    overrides: Sequence[str],
    data: Path | None = None,
    changed: Callable[[Any], Any] = lambda run: run,
) -> Iterator[Any]:
    """A trainer for a saved policy that does not train and leaves no files.

    Args:
        changed: makes the run that is built from the one that was composed.
    """
    from verl.component import BuildContext
    from verl.compose.load_policy import policy_run

    run = changed(policy_run(saved, root, overrides, None if data is None else data.absolute()))
    own_reward = root == "ppo" and not any(text.startswith("reward") for text in overrides)
    with (
        TemporaryDirectory("verl-policy-") as directory,
        run.build(BuildContext(run_dir=Path(directory))) as trainer,
    ):
        if own_reward and saved.point is not None:
            with saved.point.understanding("scheduler/state.json"):
                state = saved.point.read_json("scheduler/state.json")
                trainer.reward.load_state_dict(state.get("reward", {}))
        yield trainer


@contextmanager
def faults_reported() -> Iterator[None]:
    """Print errors of arguments and of saved files as a message, with status 2."""
    try:
        yield
    except (VerlError, OSError) as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from error
    except MemoryError as error:
        echo("There is not enough memory for this; see `ulimit -v`.", err=True)
        raise typer.Exit(2) from error
