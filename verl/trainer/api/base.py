"""Base of the trainers for scripts and notebooks: one step, all steps, checkpoints, another reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from verl.checkpoint.read.lazy_tensors import DeviceMap
from verl.component import as_plain
from verl.compose.build_trainer import build_trainer
from verl.compose.from_yaml import ComposedConfig
from verl.errors import ConfigError
from verl.rewards.base import RewardDescription
from verl.trainer.api.from_objects import reward_from_object, with_timeout_of
from verl.trainer.api.load_checkpoint import load_checkpoint
from verl.trainer.ppo import PPOTrainer
from verl.trainer.ppo_config import PPORun
from verl.trainer.setup import fit_with_restarts
from verl.trainer.state.training_identity import identity_of
from verl.trainer.train_loop import TrainLoop, TrainResult, fit
from verl.utils.component_exits import component_exits


class BaseTrainer:
    """Base of the trainers for scripts. Call `close` when done, or use it as a context manager.

    Attributes:
        config: the composed configuration.
        run: the checked description of the run.
        run_dir: where results are written.
        trainer: the roles and the algorithm.
    """

    config: Any
    run: PPORun
    run_dir: Path
    trainer: PPOTrainer
    _closing: ExitStack

    def _build(
        self,
        run: Any,
        composed: ComposedConfig,
        overrides: Sequence[str],
        tokenizer: Any = None,
        choices: Mapping[str, str | None] | None = None,
    ) -> None:
        """Build the run of a composed configuration; see `build_trainer`."""
        import rich

        self.config = composed.config
        built = build_trainer(run, composed.config, overrides, rich.get_console(), tokenizer, choices)
        self.run, self.run_dir, self.trainer, self._closing = built

    @property
    def steps(self) -> int:
        """Made so far."""
        return self._course.result.steps

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last step."""
        return dict(self._course.result.last_metrics)

    def step(self) -> float:
        """One training iteration: generate, score, assign credit, update. Logs, evaluates and saves according to the
        settings.

        Steps after the last step of the run use the final learning rate.

        Returns:
            The actor's loss, or nan if the step was skipped. `metrics` has all metrics.
        """
        course = self._under_way()
        try:
            with component_exits():
                course.step()
        except BaseException as error:
            course.failed(error)
            course.end()
            raise
        return course.result.last_metrics.get("actor/loss", math.nan)

    @component_exits()
    def fit(self) -> TrainResult:
        """Train from the current step to the end. On Ctrl-C finished work is saved first.

        In Ray, a lost worker costs the steps since the last save: see `verl.trainer.setup`.
        """
        self._under_way()
        return fit_with_restarts(self.trainer, self._fit_once, self.trainer.max_restarts)

    def _fit_once(self, may_restart: bool) -> TrainResult:
        if self._course.is_over:  # a worker was lost: the trainer is rebuilt
            del self._course
        course = self._under_way()
        return fit(course.trainer, course.config, course, may_restart=may_restart)

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
        course, saving = self._opened(), self.trainer.saving
        saving.identity = saving.identity or identity_of(as_plain(self.trainer.description), self.trainer.tokenizer)
        return course.save(tag, None if save_dir is None else Path(save_dir))

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
            device_map: device by way of which tensors are copied to the weights, such as `cuda:0`; default: main
                memory.
        """
        load_checkpoint(self._under_way(), path, load_components, mmap, device_map)

    @property
    def reward_model(self) -> Any:
        """The reward. It can be set to another reward, in any form that the constructor takes; the policy, its
        optimizer and the position in the data are kept."""
        return self.trainer.reward

    @reward_model.setter
    @component_exits()
    def reward_model(self, reward: Any) -> None:
        described = self._described_reward(reward)
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
            course = self.__dict__.get("_course")
            if course is not None and course.is_open and not course.is_over:
                is_all = course.result.steps >= self.trainer.num_steps
                if is_sound:
                    course.result.status = "finished" if is_all else "stopped"
                course.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(is_sound=error is None)

    @cached_property
    def _course(self) -> TrainLoop:
        trainer: Any = self.trainer
        return TrainLoop(trainer, as_plain(trainer.description))

    def _opened(self) -> TrainLoop:
        """The course, which may have ended."""
        self._course.open()
        return self._course

    def _under_way(self) -> TrainLoop:
        """The course, opened.

        Raises:
            ConfigError: it has ended.
        """
        if self._course.is_over:
            raise ConfigError(
                f"this trainer has ended ({self._course.result.status}, step {self._course.result.steps}). Make "
                "another one, and load_checkpoint to go on."
            )
        return self._opened()

    def _described_reward(self, reward: Any) -> RewardDescription:
        """The description of a reward in any form."""
        return reward_from_object(reward)
