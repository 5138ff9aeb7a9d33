"""A training session: the four verbs of a training loop of one's own, on one set of weights that trains and generates.

    session = TrainingSession("MODEL", rank=16)
    samples = session.sample(prompts, num_samples=8)           responses with log-probs
    session.forward_backward(data, "importance_sampling")      gradients, accumulated over calls
    session.optim_step(lr=1e-4)                                AdamW
    session.save("DIRECTORY")                                  peft's files, optimizer, counters

`verl serve-training` offers the same verbs over HTTP, in Tinker's protocol.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from verl.errors import ConfigError
from verl.model_paths.micro_batch import MicroBatch
from verl.models.lora import LoRA
from verl.models.parallel_info import Autocast
from verl.models.pretrained import ModelSource, Pretrained
from verl.ops.masking import LossTotals
from verl.rollout.base import Rollout
from verl.service import saved
from verl.service.adapters import BaseModel
from verl.service.data import Datum, LossOutput, LossRows, checked_tokens, loss_rows
from verl.service.losses import loss_of
from verl.service.sampling import PromptRequest, Sample, SamplingOptions, sample
from verl.utils.memory import refuse_device


class TrainingSession:
    """One adapter in training, with the verbs of a training loop.

    Several sessions share one base model in memory: `another` makes one more. A step of one changes no bit of another.
    Calls from several threads wait for each other. Results depend on the calls alone, not on time or on other sessions.

    Args:
        model: a directory, the name of a model on the hub, a GGUF file, a `ModelSource`, or the `base` of another
            session, to which the options of computation belong.
        rank, alpha: of the adapter, see `LoRA`.
        seed: of the adapter's first weights, and of sampling.
        device: `auto` for a GPU if there is one.
        autocast: `bfloat16` to compute in it; None for the dtype of the weights.
        micro_batch_tokens: the most tokens of a forward pass; bounds memory and affects results by rounding only.
        rollout: engine that samples, such as `VLLMRollout`; None for the tensors that train. One with weights of its
            own gets those of a session before it samples from them, and they are verified.
        lora: the adapter, in place of `rank`, `alpha` and these:
        parts: which layers have one: attention, mlp, unembedding; by default all.
    Attributes:
        base: the base model, which other sessions may share.
        engine: of the adapter.
    Raises:
        ConfigError: the model cannot be loaded or trained.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        model: str | Path | ModelSource | BaseModel,
        rank: int = 32,
        *,
        alpha: float = 32.0,
        seed: int = 0,
        device: str = "auto",
        autocast: Autocast = None,
        micro_batch_tokens: int = 16384,
        rollout: Rollout | None = None,
        lora: LoRA | None = None,
        **parts: bool,
    ):
        self._owns_base, self.seed = not isinstance(model, BaseModel), seed
        if not isinstance(model, BaseModel):
            source = model if isinstance(model, ModelSource) else Pretrained(path=str(model))
            if micro_batch_tokens < 1:
                raise ConfigError(f"micro_batch_tokens is {micro_batch_tokens}: expected at least 1.")
            if device == "auto":
                device = "cuda:0" if torch.cuda.is_available() else "cpu"
            refuse_device(device, "device")
            model = BaseModel(source, device, autocast, micro_batch_tokens, rollout=rollout)
        self.base, self._samplings = model, 0
        self.name = f"session_{next(self._numbers)}"
        self.lora = lora or LoRA(rank=rank, alpha=alpha, target_modules=self.base.layers(**parts))
        with self.base.lock:
            self.engine = self.base.add(self.name, self.lora, seed)

    def another(self, rank: int = 32, **options: Any) -> TrainingSession:
        """One more adapter on the same base model, independent of this one: alpha, seed, parts."""
        return TrainingSession(self.base, rank, **options)

    @property
    def updates(self) -> int:
        """Optimizer steps made."""
        return self.engine.updates

    @property
    def tokenizer(self) -> Any:
        return self.base.tokenizer

    # Training

    def forward(self, data: Sequence[Datum], loss: str = "cross_entropy", **settings: float) -> LossOutput:
        """The loss of data and the log-probs of their targets, without gradients.

        Args, Raises: see `forward_backward`.
        """
        rows = self._rows(data, loss, settings)
        with self.base.lock:
            self.base.activate(self.name)
            scores = self.engine.infer(rows.batch, functools.partial(rows.scores, self.base.head))
        return rows.output(scores["log_probs"])

    def forward_backward(self, data: Sequence[Datum], loss: str = "cross_entropy", **settings: float) -> LossOutput:
        """Add the gradient of the loss of data to that of earlier calls since the last `optim_step`.

        Args:
            data: rows of tokens with targets and the inputs of the loss.
            loss: a name of `verl.service.losses.LOSSES`: cross_entropy, importance_sampling, ppo, cispo, gspo, dro.
            settings: of the loss, such as `clip_low_threshold`.
        Raises:
            ConfigError: the data do not fit the loss or the model; names the datum.
        """
        rows = self._rows(data, loss, settings)
        found: dict[int, Tensor] = {}

        def loss_of_one(model: nn.Module, micro: MicroBatch, _: LossTotals) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, at = rows.scores(self.base.head, model, micro)["log_probs"], micro.rows.cpu()
            found.update(zip(at.tolist(), log_probs.detach().cpu(), strict=True))
            return rows.losses(log_probs, at).sum(), {}

        with self.base.lock:
            self.base.activate(self.name)
            self.engine.forward_backward(rows.batch, loss_of_one)
            return rows.output(pad_sequence([found[row] for row in range(len(data))], batch_first=True))

    def _rows(self, data: Sequence[Datum], loss: str, settings: Mapping[str, Any]) -> LossRows:
        return loss_rows(data, *loss_of(loss, settings), self.base.vocabulary, self.base.longest)

    def optim_step(
        self,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
    ) -> dict[str, float]:
        """One step of AdamW (arXiv:1711.05101, algorithm 2) with the gradients since the last one.

        Args:
            lr, betas, eps, weight_decay: of this step.
            max_grad_norm: gradients of a larger L2 norm are scaled down to it; None or 0 for no clipping.
        Returns:
            `grad_norm` before clipping, `lr`, `loss`, the sum of the losses; a step of which one is not finite is
            skipped, and its `is_skipped` is 1.
        Raises:
            ConfigError: a value is out of its range.
            NoGradients: `forward_backward` was not called before.
        """
        values = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        chosen = dataclasses.replace(self.engine.optimizer_config, lr=lr, max_grad_norm=max_grad_norm or None, **values)
        with self.base.lock:
            before = self.updates
            self.base.activate(self.name)
            self.engine.optimizer_config = chosen
            for group in self.engine.optimizer.param_groups:  # an adapter has matrices alone
                group.update(values)
            metrics = self.engine.optim_step()
        return {**metrics, "is_skipped": float(self.updates == before)}

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        with self.base.lock:
            self.engine.release()

    # Sampling

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int = 1,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> list[list[Sample]]:
        """Sample responses with the current weights.

        Args:
            prompts: token ids of each.
            num_samples: responses to each prompt.
            seed: of the noise; None for one that differs from call to call, and that a session with the same calls
                repeats.
            options: of `SamplingOptions`: max_new_tokens, temperature, top_k, top_p, stop.
        Returns:
            For each prompt its samples.
        """
        chosen = SamplingOptions(**options)
        if num_samples < 1:
            raise ConfigError(f"num_samples is {num_samples}: expected at least 1.")
        longest = self.base.longest
        rows = [checked_tokens(tokens, "prompt", self.base.vocabulary, longest).tolist() for tokens in prompts]
        if any(len(row) == longest for row in rows):
            raise ConfigError(f"prompt has {longest} tokens, as many as the model reads: it leaves no response.")
        with self.base.lock, self.base.sampling_from(self.name) as engine:
            self._samplings += 1
            noise = (self.seed, "call", self._samplings) if seed is None else (seed,)
            requests = [PromptRequest(tokens, num_samples, noise) for tokens in rows]
            return sample(engine, self.tokenizer, requests, chosen, longest)

    # State

    def weights(self) -> dict[str, Tensor]:
        """A copy of the trained weights, by their names in peft's file."""
        with self.base.lock:
            return self.base.weights(self.name)

    def save(self, directory: str | Path, optimizer: bool = True) -> None:
        """Write weights, optimizer and counters to a new directory, which appears whole or not at all.

        It is a directory of peft with two more files.

        Args:
            optimizer: without it the directory is for sampling alone.
        Raises:
            ConfigError: the directory exists.
        """
        with self.base.lock:
            lora, tensors = dataclasses.asdict(self.lora), self.engine.optimizer_tensors() if optimizer else None
            record = saved.SessionRecord(lora, self.updates, self._samplings, self.base.digest, {})
            saved.write(Path(directory), self.base, self.name, record, tensors)

    def load(self, directory: str | Path, optimizer: bool = True) -> None:
        """Continue from a saved session: the same calls then give the same bits as in the one that was saved.

        Gradients of this session are dropped.

        Args:
            optimizer: also load the optimizer; without it the next step is as the first one.
        Raises:
            ConfigError: the directory holds no session of such an adapter, or is damaged; this one is unchanged.
        """
        directory = Path(directory)
        record = saved.read_record(directory, self.base)
        if record.adapter != self.lora:
            raise ConfigError(f"{directory} holds a session of {record.adapter}, and this one is of {self.lora}.")
        if optimizer and saved.OPTIMIZER not in record.digests:
            raise ConfigError(
                f"{directory} was saved for sampling, without an optimizer: load it with optimizer=False."
            )
        weights = saved.read_tensors(directory, saved.ADAPTER, record)
        tensors = saved.read_tensors(directory, saved.OPTIMIZER, record) if optimizer else {}
        with self.base.lock:
            self.base.activate(self.name)
            self.base.set_weights(self.name, weights)
            self.drop_gradients()
            self.engine.optimizer.state.clear()
            self.engine.load_optimizer(tensors, record.updates if optimizer else 0)
            self._samplings = record.samplings if optimizer else self._samplings

    def close(self) -> None:
        """Free the adapter; in the session that loaded the base model also end the process of a sampling engine."""
        with self.base.lock:
            self.base.remove(self.name)
            if self._owns_base:
                self.base.close()

    def __enter__(self) -> TrainingSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
