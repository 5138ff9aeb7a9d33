"""Trainer: policy optimisation from a script or a notebook, with models, data and rewards passed as objects.

trainer = Trainer(model="Qwen/Qwen2-0.5B", reward_model=reward, train_dataset=rows, algorithm="grpo")
loss = trainer.step()
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from verl.algorithms.algorithm import Algorithm
from verl.checkpoint.read.lazy_tensors import DeviceMap
from verl.component import Description, as_plain, field_types
from verl.compose.from_yaml import (
    ComposedConfig,
    compose_over_default,
    described,
    load_option,
    read_short_file,
)
from verl.compose.overrides import flatten
from verl.compose.run_start import RunStart
from verl.data.arithmetic import ArithmeticPrompts
from verl.data.base import PromptOptions
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.models.pretrained import ModelSource
from verl.trainer.api.from_objects import (
    ModelObject,
    PromptsObject,
    data_from_object,
    model_from_object,
    reward_from_object,
    run_with_objects,
    with_timeout_of,
)
from verl.trainer.api.load_checkpoint import load_checkpoint
from verl.trainer.ppo import PPOTrainer
from verl.trainer.ppo_config import PPORun
from verl.trainer.state.training_identity import identity_of
from verl.trainer.train_loop import TrainLoop, TrainResult, fit, fit_with_restarts
from verl.utils.signals import component_exits

_log = logging.getLogger(__name__)

PROMPTS_PER_STEP = 64  # at most, where nothing says how many
OF_TRAINING = {  # keys of train_config with another configuration path
    "lr": "actor.optimizer.lr",
    "critic_lr": "critic.optimizer.lr",
    "num_epochs": "trainer.total_epochs",
}


class Trainer:
    """Policy optimisation over the composed default of `verl ppo`, by the same roles and the same loop.

    A model may be a path, a hub name, a description such as `TinyModel()`, or a loaded Hugging Face model, which is
    trained in place. Only warnings are shown on the console. Call `close` when done, or use it as a context manager.

    Args:
        model: the policy.
        reward_model: a function of prompts and responses, `file.py:function`, a reward model (a module that returns
            `scores`, a Hugging Face sequence-classification model, or the path of one), or a description.
        train_dataset: prompts: rows (dicts with a `prompt`), an `RLHFDataset`, a parquet or JSONL file, or several.
            None: the data of the configuration, which are the built-in sums where it names none, with a warning.
        ref_model: reference model for KL, for algorithms that use one; None: the initial policy.
        critic_model: initial model of the critic, for algorithms that need one; None: the initial policy.
        tokenizer: required for a loaded model; default: the tokenizer in the model's directory.
        reward_tokenizer: of a reward model that is passed as a module and has another tokenizer than the policy.
        eval_dataset: like `train_dataset`; None: no evaluation.
        algorithm: an option of the group `algorithm`, or an `Algorithm`.
        rollout_config: keys of the rollout engine (`temperature`, `max_new_tokens`, ...), `n` responses per prompt,
            `engine`, an option of the group `rollout`, and instead of `max_new_tokens` a `max_length` of prompt and
            response together, at most the model's context: half of it is for the response, or what
            `data_config["max_prompt_length"]` leaves.
        checkpoint_config: keys of `Checkpointing` (`save_dir`, `save_interval`, `keep_last_n`, ...); None: save only
            when `save_checkpoint` is called.
        train_config: keys of `PPOSettings` (`total_steps`, `prompts_per_step`, `seed`, ...), `lr`, `critic_lr`, and
            `num_epochs` for `total_epochs`.
        data_config: keys of `PromptOptions`.
        lora: train a low-rank adapter: a `LoRA`, or a mapping of its keys.
        config: a short YAML file or a mapping that is merged into the default; arguments have precedence over it.
        overrides: as on the command line; they have the highest precedence.

    Attributes:
        config: the composed configuration.
        run: the checked description of the run.
        run_dir: where results are written.
        trainer: the roles and the algorithm.

    Raises:
        ConfigError: with all faults that can be found before weights are loaded.
    """

    config: Any
    run: PPORun
    run_dir: Path
    trainer: PPOTrainer
    _closing: ExitStack
    _reward_tokenizer: Any = None

    @component_exits()
    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        critic_model: Any = None,
        tokenizer: Any = None,
        train_dataset: Any = None,
        algorithm: str | Algorithm = "grpo",
        rollout_config: Mapping[str, Any] | None = None,
        checkpoint_config: Mapping[str, Any] | None = None,
        *,
        reward_tokenizer: Any = None,
        eval_dataset: Any = None,
        train_config: Mapping[str, Any] | None = None,
        data_config: Mapping[str, Any] | None = None,
        lora: LoRA | Mapping[str, Any] | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
    ):
        needed = {"model": model, "reward_model": reward_model}
        if missing := [name for name, value in needed.items() if value is None]:
            raise ConfigError([f"{name} is missing. Give Trainer({name}=...)." for name in missing])
        if train_dataset is None and eval_dataset is not None:
            raise ConfigError("eval_dataset is given without train_dataset. Give both, or neither.")
        self._reward_tokenizer = reward_tokenizer
        if isinstance(tokenizer, (str, Path)):
            raise ConfigError(
                f"tokenizer is {str(tokenizer)!r}: expected a loaded one, AutoTokenizer.from_pretrained(...)."
            )
        if tokenizer is not None and tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        replacements: dict[str, Description] = {
            "actor.model": model_from_object("model", model, tokenizer),
            "reward": reward_from_object(reward_model, reward_tokenizer),
        }
        if ref_model is not None:
            replacements["reference.model"] = model_from_object("ref_model", ref_model, tokenizer)
        if critic_model is not None:
            replacements["critic.model"] = model_from_object("critic_model", critic_model, tokenizer)
        if lora is not None:
            replacements["actor.lora"] = described(LoRA, "lora", lora)
        rollout_config, data_config = _with_lengths(
            replacements["actor.model"], rollout_config or {}, data_config or {}
        )
        own = {} if train_dataset is None else field_types(PromptOptions)  # keys that prompts passed here accept
        if train_dataset is not None:
            options = {key: value for key, value in data_config.items() if key in own}
            room = _room(replacements["actor.model"], rollout_config, options)
            replacements["data"] = data_from_object(
                train_dataset, eval_dataset, described(PromptOptions, "data_config", room)
            )
        if isinstance(algorithm, Algorithm):
            replacements["algorithm"] = algorithm
        below = _defaults(replacements, checkpoint_config is not None, algorithm)
        above = _arguments(algorithm, rollout_config, checkpoint_config, train_config)
        above |= {f"data.{key}": value for key, value in data_config.items() if key not in own}
        short = read_short_file(config) if isinstance(config, (str, Path)) else dict(config or {})
        nodes = {key: as_plain(item) for key, item in replacements.items()}
        composed = compose_over_default({**below, **dict(flatten(short)), **above}, overrides, nodes)
        run = run_with_objects(composed, replacements)
        _refuse_unused(run, ref_model, critic_model)
        _refuse_objects_elsewhere(run, replacements)
        self._build(run, composed, overrides, tokenizer)
        if train_dataset is None and isinstance(run.data, ArithmeticPrompts):
            _log.warning("No prompts are given: the run trains on the built-in sums, such as 37+58=.")

    @classmethod
    def of_run(
        cls, run: Any, composed: ComposedConfig, overrides: Sequence[str], choices: Mapping[str, str | None]
    ) -> Self:
        """A trainer of a run that was composed and checked elsewhere."""
        trainer = cls.__new__(cls)
        trainer._build(run, composed, overrides, choices=choices)
        return trainer

    def _build(
        self,
        run: Any,
        composed: ComposedConfig,
        overrides: Sequence[str],
        tokenizer: Any = None,
        choices: Mapping[str, str | None] | None = None,
    ) -> None:
        """Build a checked run; leaves no files if this machine cannot run it."""
        import rich

        now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
        run_dir = Path("outputs").resolve() / run.trainer.project_name / run.trainer.experiment_name / now
        start = RunStart(composed.config, "ppo", choices, run_dir, rich.get_console(), overrides=list(overrides))
        try:
            self.trainer = start.build(run, tokenizer)
        except BaseException as error:
            start.closing.close()
            if isinstance(error, ConfigError):
                start.withdraw()
            raise
        start.closing.callback(self.trainer.close)
        self.config, self.run, self.run_dir = composed.config, self.trainer.description, run_dir
        self._closing = start.closing

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return self._loop.result.steps

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self._loop.result.last_metrics)

    def step(self) -> float:
        """One training iteration: generate, score, assign credit, update. Logs, evaluates and saves according to the
        settings.

        Steps after the last step of the run use the final learning rate.

        Returns:
            The actor's loss, or nan if the step was skipped. `metrics` has all metrics.
        """
        loop = self._active_loop()
        try:
            with component_exits():
                loop.step()
        except BaseException as error:
            loop.failed(error)
            loop.end()
            raise
        return loop.result.last_metrics.get("actor/loss", math.nan)

    @component_exits()
    def fit(self) -> TrainResult:
        """Train from the current step to the end. On Ctrl-C finished work is saved first.

        In Ray, a lost worker costs the steps since the last save: see `verl.trainer.train_loop`.
        """
        self._active_loop()
        return fit_with_restarts(self.trainer, self._fit_once, self.trainer.settings.max_restarts)

    def _fit_once(self, may_restart: bool) -> TrainResult:
        if self._loop.is_over:  # a worker was lost: the trainer is rebuilt
            del self._loop
        loop = self._active_loop()
        return fit(loop.trainer, loop, may_restart=may_restart)

    @component_exits()
    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights on the held-out rows; returns metrics.

        Raises:
            ConfigError: there are no held-out rows.
        """
        if self.trainer.eval_data is None:
            raise ConfigError("eval_dataset is missing: there are no held-out rows. Give it, or data.eval_files.")
        return self._opened().evaluate()

    @component_exits()
    def save_checkpoint(self, save_dir: str | Path | None = None, tag: str | None = None) -> Path:
        """Save a checkpoint and wait until it is published.

        Args:
            save_dir: directory of checkpoints; default: that of the run.
            tag: the name of the checkpoint's directory, such as `loss_0.12_step_500`; otherwise `global_step_N`.
        Returns:
            The directory of the checkpoint.
        Raises:
            CheckpointError: it could not be saved.
        """
        loop, saving = self._opened(), self.trainer.saving
        saving.identity = saving.identity or identity_of(as_plain(self.trainer.description), self.trainer.tokenizer)
        return loop.save(tag, None if save_dir is None else Path(save_dir).expanduser())

    @component_exits()
    def load_checkpoint(
        self,
        path: str | Path,
        mmap: bool = False,
        load_components: Sequence[str] | None = None,
        device_map: DeviceMap = None,
    ) -> None:
        """Load a checkpoint into the live weights, without rebuilding any role.

        Args:
            path: `latest`, a checkpoint, a directory of checkpoints, or the directory of a run.
            mmap: copy from the mapped files, instead of reading them into memory first.
            load_components: some of `actor`, `critic`, `optimizer`, `scheduler`, `dataloader`, `rng`; None: all of
                them, after which training continues exactly as after the save, bit for bit.
            device_map: device that tensors are read to before they are copied, such as `cuda:0`; default: main memory.
        """
        load_checkpoint(self._active_loop(), path, load_components, mmap, device_map)

    @property
    def reward_model(self) -> Any:
        """The reward. It can be set to another reward, in any form that the constructor takes; the policy, its
        optimizer and the position in the data are kept."""
        return self.trainer.reward

    @reward_model.setter
    @component_exits()
    def reward_model(self, reward: Any) -> None:
        described = reward_from_object(reward, self._reward_tokenizer)
        self.trainer.replace_reward(with_timeout_of(described, self.trainer.description.reward))

    def reset_reward_stats(self) -> None:
        """Reset the reward's statistics of scores, such as their running mean."""
        self.reward_model.reset_stats()

    def close(self) -> None:
        """Write final results, stop all processes and free the weights. Idempotent."""
        self._end()

    @component_exits()
    def _end(self, is_sound: bool = True) -> None:
        with self._closing:
            loop = self.__dict__.get("_loop")
            if loop is not None and loop.is_open and not loop.is_over:
                is_all = loop.result.steps >= self.trainer.num_steps
                if is_sound:
                    loop.result.status = "finished" if is_all else "stopped"
                loop.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(is_sound=error is None)

    @cached_property
    def _loop(self) -> TrainLoop:
        trainer: Any = self.trainer
        return TrainLoop(trainer, as_plain(trainer.description))

    def _opened(self) -> TrainLoop:
        """The loop; it may have ended.

        Raises:
            ConfigError: the trainer is closed.
        """
        if self.trainer.cluster is None:
            raise ConfigError("this trainer is closed. Make another one, and load_checkpoint to go on.")
        self._loop.open()
        return self._loop

    def _active_loop(self) -> TrainLoop:
        """The loop, opened if necessary.

        Raises:
            ConfigError: it has ended.
        """
        if self._loop.is_over:
            raise ConfigError(
                f"this trainer has ended ({self._loop.result.status}, step {self._loop.result.steps}). Make "
                "another one, and load_checkpoint to go on."
            )
        return self._opened()


def _defaults(replacements: Mapping[str, Description], saves: bool, algorithm: str | Algorithm) -> dict[str, Any]:
    """Defaults for library use: options of groups, and values by path."""
    options = {
        "actor": "pretrained",
        "critic": "own_model" if "critic.model" in replacements else "same_as_actor",
        "checkpoint": "async" if saves else "off",
        "tracker.console": None,
    }
    if (data := replacements.get("data")) is None:
        return options
    prompts = min(PROMPTS_PER_STEP, data.num_rows if isinstance(data, PromptsObject) else PROMPTS_PER_STEP)
    if prompts % 2:  # few rows are allowed, but a step must divide into its mini-batches
        chosen = algorithm if isinstance(algorithm, Algorithm) else load_option("algorithm", algorithm)
        prompts = max(prompts - prompts % chosen.mini_batches, 1)
    return {
        **options,
        "data": "files",  # without the lengths of the built-in example
        "trainer.prompts_per_step": prompts,
    }


def _arguments(
    algorithm: str | Algorithm,
    rollout: Mapping[str, Any],
    checkpoint: Mapping[str, Any] | None,
    train: Mapping[str, Any] | None,
) -> dict[str, Any]:
    chosen: dict[str, Any] = {} if isinstance(algorithm, Algorithm) else {"algorithm": algorithm}
    for key, value in rollout.items():
        if key == "engine":
            chosen["rollout"] = value
        else:
            plain = as_plain(value) if isinstance(value, Description) else value
            chosen["trainer.group_size" if key == "n" else f"rollout.{key}"] = plain
    chosen |= {f"checkpoint.{key}": value for key, value in (checkpoint or {}).items()}
    return chosen | {OF_TRAINING.get(key, f"trainer.{key}"): value for key, value in (train or {}).items()}


def _refuse_unused(run: Any, ref_model: Any, critic_model: Any) -> None:
    faults = []
    if critic_model is not None and not run.algorithm.needs_values:
        faults.append("critic_model is given: the algorithm uses no values. Leave it out, or choose algorithm='ppo'.")
    if ref_model is not None and not run.algorithm.needs_reference:
        faults.append("ref_model is given: algorithm.kl.coef is 0, so nothing is compared with it. Leave it out.")
    if faults:
        raise ConfigError(faults)


def _refuse_objects_elsewhere(run: Any, replacements: Mapping[str, Description]) -> None:
    models = [item.argument for item in replacements.values() if isinstance(item, ModelObject)]
    if models and (sharded := [sharding for sharding in run.shardings().values() if sharding.needs_processes]):
        kind = type(sharded[0]).__name__.lower()
        raise ConfigError(
            f"sharding={kind} trains in processes of its own, and {' and '.join(models)} is an object of this one. "
            "Save it and give a path instead, or leave sharding=none."
        )
    if models and run.trainer.placement is not None:
        raise ConfigError(
            f"trainer.placement puts roles into other processes, and {' and '.join(models)} is an object of this "
            "one. Save it and give a path instead, or leave trainer=local."
        )


def _with_lengths(
    model: Description, rollout: Mapping[str, Any], data: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both configurations with `max_length` replaced by separate limits for prompts and responses."""
    rollout, data = dict(rollout), dict(data)
    total = rollout.pop("max_length", None)
    if total is None:
        return rollout, data
    if not isinstance(total, int) or isinstance(total, bool) or total < 2:
        raise ConfigError(f"rollout_config.max_length is {total!r}: expected a whole number of at least 2.")
    context = model.max_positions() if isinstance(model, ModelSource) else None
    total = total if context is None else min(total, context)
    prompt, response = data.get("max_prompt_length"), rollout.get("max_new_tokens")
    if prompt is not None and response is not None:
        raise ConfigError(
            f"rollout_config.max_length is {total}: data_config.max_prompt_length {prompt} and rollout_config."
            f"max_new_tokens {response} say the same. Leave one of them out."
        )
    if response is None:
        response = total // 2 if prompt is None else total - prompt
    prompt = total - response if prompt is None else prompt
    if prompt < 1 or response < 1:
        known = "data_config.max_prompt_length" if "max_prompt_length" in data else "rollout_config.max_new_tokens"
        raise ConfigError(f"rollout_config.max_length is {total}: {known} leaves nothing of it. Set that lower.")
    return {**rollout, "max_new_tokens": response}, {**data, "max_prompt_length": prompt}


def _room(model: Description, rollout: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data options, with a limit on prompts that leaves room for responses in a short context."""
    context = model.max_positions() if isinstance(model, ModelSource) else None
    response = rollout.get("max_new_tokens")
    if context is None or not isinstance(response, int) or "max_prompt_length" in options or context <= response:
        return options
    usual = PromptOptions().max_prompt_length
    return {**options, "max_prompt_length": min(usual, context - response)}
