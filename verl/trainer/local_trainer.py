"""PPO from a script or a notebook: one short file, everything in this process, no Ray.

trainer = LocalPPOTrainer(config_path="./config.yaml", train_dataset=dataset)
trainer.fit()
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from verl.cluster.mesh import DeviceMesh
from verl.compose.check import check
from verl.compose.save import save
from verl.compose.short_file import Composed, compose_over_default, read_short_file
from verl.compose.show import show
from verl.compose.warm_start import resolve_warm_starts
from verl.data.files import PromptFiles
from verl.data.options import PromptOptions
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.splits import Splits
from verl.description import BuildContext, as_plain
from verl.errors import ConfigError
from verl.rewards.base import RewardDescription
from verl.rewards.function import RewardFunction
from verl.tracking.logs import setup_logging
from verl.trainer.loop import Result

_log = logging.getLogger(__name__)


class LocalPPOTrainer:
    """Policy optimisation with every role in this process, or in processes that it starts itself (sharding=ddp).

    Works from a script without a `__main__` guard and from a notebook. Also a context manager.

    Args:
        config_path: a short YAML file, laid over the composed default of `main_ppo.py`: values by their paths, and
            options of groups by name, such as `algorithm: grpo`. None takes the default as it is.
        train_dataset: prompts to train on, in place of the configured data: an `RLHFDataset`, a list of rows (dicts
            with a `prompt`), or the path of a parquet or JSONL file. `data.eval_files` still names what to evaluate on.
        reward_fn: a function of prompts and responses, in place of the configured reward; see `RewardFunction`.
        overrides: laid over the file, as on the command line.
        device_mesh: which roles live on which devices of this machine, in place of the configured placement.

    Attributes:
        config: the composed configuration.
        run: its checked description.
        run_dir: where results are written.

    Raises:
        ConfigError: every fault in the configuration, before any weight is loaded.
    """

    def __init__(
        self,
        config_path: str | Path | None = "./config.yaml",
        train_dataset: RLHFDataset | Sequence[Mapping[str, Any]] | str | Path | None = None,
        reward_fn: Callable | None = None,
        overrides: Sequence[str] = (),
        device_mesh: DeviceMesh | None = None,
    ):
        import rich

        console = rich.get_console()
        short = read_short_file(config_path) if config_path is not None else {}
        composed = _compose(short, train_dataset, reward_fn, overrides, device_mesh)
        for note in composed.notes:
            console.print(note, markup=False, soft_wrap=True)
        run = _hand_over(check(composed.config, composed.faults), train_dataset, reward_fn)
        show(composed.config, console)
        self.config, self.run_dir = composed.config, _run_dir(run)
        save(composed.config, overrides, self.run_dir)
        self._closing = ExitStack()
        self._closing.callback(setup_logging(self.run_dir))
        try:
            self.run = resolve_warm_starts(run, console)
            self.trainer = self.run.build(BuildContext(run_dir=self.run_dir))
        except BaseException:
            self._closing.close()
            raise
        self._closing.callback(self.trainer.close)

    def fit(self) -> Result:
        """Train to the end. On Ctrl-C what is finished is written first."""
        return self.trainer.fit()

    def close(self) -> None:
        """End the processes that were started and let go of the weights; may be called again."""
        self._closing.close()

    def __enter__(self) -> LocalPPOTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class GivenPrompts(PromptOptions):
    """Prompts passed as `train_dataset`. The rows themselves are no configuration and no field.

    Args:
        num_rows: of the data that were passed.
        eval_files: paths whose rows are evaluated on; none for no evaluation.
    """

    num_rows: int
    eval_files: tuple[str, ...] = ()

    def with_rows(self, rows: RLHFDataset | Sequence[Mapping[str, Any]]) -> GivenPrompts:
        """The same description, carrying the rows."""
        made = dataclasses.replace(self)
        object.__setattr__(made, "_rows", rows)
        return made

    def build(self, context: BuildContext) -> Splits:
        rows = self._rows  # type: ignore[attr-defined]
        options = PromptOptions(**{f.name: getattr(self, f.name) for f in dataclasses.fields(PromptOptions)})
        if isinstance(rows, RLHFDataset):
            _refuse_other_tokenizer(rows, context.tokenizer)
        else:
            rows = RLHFDataset.from_rows(rows, context.tokenizer, options)
        held_out = RLHFDataset(self.eval_files, context.tokenizer, options) if self.eval_files else None
        return Splits(train=rows, eval=held_out)


@dataclass(frozen=True, kw_only=True)
class GivenReward(RewardDescription):
    """A function passed as `reward_fn`. The function itself is no configuration and no field.

    Args:
        name: of the function.
    """

    name: str

    def with_function(self, function: Callable) -> GivenReward:
        """The same description, carrying the function."""
        made = dataclasses.replace(self)
        object.__setattr__(made, "_function", function)
        return made

    def build(self, context: BuildContext) -> Any:
        return RewardFunction.wrap(self._function)  # type: ignore[attr-defined]


def _compose(
    short: Mapping[str, Any],
    train_dataset: Any,
    reward_fn: Any,
    overrides: Sequence[str],
    device_mesh: DeviceMesh | None,
) -> Composed:
    replacements, notes = {}, []
    if device_mesh is not None:
        replacements["trainer.placement"] = as_plain(device_mesh)
    if isinstance(train_dataset, (str, Path)):
        replacements["data"] = {"_target_": _path_of(PromptFiles), "train_files": [str(train_dataset)]}
    elif train_dataset is not None:
        replacements["data"] = {"_target_": _path_of(GivenPrompts), "num_rows": len(train_dataset)}
        if isinstance(train_dataset, RLHFDataset):
            replacements["data"] |= dataclasses.asdict(train_dataset.options)
    if reward_fn is not None:
        name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
        replacements["reward"] = {"_target_": _path_of(GivenReward), "name": name}
    if train_dataset is not None and isinstance(short.get("data"), dict) and "train_files" in short["data"]:
        kept = {key: value for key, value in short["data"].items() if key != "train_files"}
        short = {**short, "data": kept}
        notes.append("data.train_files is set aside: train_dataset is given.")
    if train_dataset is not None and not any(option.startswith("data=") for option in overrides):
        overrides = ["data=files", *overrides]  # not the lengths that suit the embedded example
    composed = compose_over_default("ppo", short, overrides, replacements)
    composed.notes = [*notes, *composed.notes]
    return composed


def _hand_over(run: Any, train_dataset: Any, reward_fn: Any) -> Any:
    """Put what is no configuration into the descriptions that stand for it."""
    if isinstance(run.data, GivenPrompts):
        if isinstance(train_dataset, RLHFDataset):
            _refuse_other_options(run.data, train_dataset)
        run = dataclasses.replace(run, data=run.data.with_rows(train_dataset))
    if isinstance(run.reward, GivenReward):
        run = dataclasses.replace(run, reward=run.reward.with_function(reward_fn))
    return run


def _refuse_other_options(given: GivenPrompts, dataset: RLHFDataset) -> None:
    faults = []
    for f in dataclasses.fields(PromptOptions):
        configured, made_with = getattr(given, f.name), getattr(dataset.options, f.name)
        if configured != made_with:
            faults.append(f"data.{f.name} is {configured!r}: train_dataset was made with {made_with!r}. Leave one out.")
    if faults:
        raise ConfigError(faults)


def _refuse_other_tokenizer(dataset: RLHFDataset, tokenizer: Any) -> None:
    theirs, ours = dataset.collate([0]).meta_info["pad_token_id"], tokenizer.pad_token_id
    if theirs != ours:
        raise ConfigError(
            f"train_dataset pads with token {theirs}, the actor's tokenizer with {ours}: use that tokenizer."
        )


def _run_dir(run: Any) -> Path:
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    return Path("outputs").resolve() / run.trainer.project_name / run.trainer.experiment_name / now


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
