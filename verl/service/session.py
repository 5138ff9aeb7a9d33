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
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.engines.chunked_logprobs import token_log_probs
from verl.errors import ConfigError, VerlError
from verl.model_paths.micro_batch import MicroBatch
from verl.models.parallel_info import Autocast
from verl.models.pretrained import ModelSource, Pretrained
from verl.ops.masking import LossTotals
from verl.rollout.base import Rollout
from verl.service import saved
from verl.service.adapters import AdapterShape, BaseModel
from verl.service.data import CANDIDATES, Datum, LossRows, finite, loss_rows
from verl.service.losses import Loss, Settings, loss_of
from verl.service.sampling import PromptRequest, Sample, SamplingOptions, sample


class NoGradients(VerlError, RuntimeError):
    """A step of the optimizer without gradients."""


@dataclass(frozen=True)
class LossOutput:
    """Result of a forward pass.

    Attributes:
        loss: sum over all target tokens, in nats for cross_entropy.
        log_probs: for each datum, of its targets [N] or [N K].
        per_token: for each datum, the loss of each token, of the same shape.
    """

    loss: float
    log_probs: list[Tensor]
    per_token: list[Tensor]


class TrainingSession:
    """One adapter in training, with the verbs of a training loop.

    Several sessions share one base model in memory: `another` makes one more. A step of one changes no bit of another.
    Calls from several threads wait for each other. Results depend on the calls alone, not on time or on other sessions.

    Args:
        model: a directory, the name of a model on the hub, a GGUF file, or a `ModelSource`.
        rank: of the adapter.
        seed: of the adapter's first weights, and of sampling.
        device: `auto` for a GPU if there is one.
        autocast: `bfloat16` to compute in it; None for the dtype of the weights.
        micro_batch_tokens: the most tokens of a forward pass; bounds memory and affects results by rounding only.
        rollout: engine that samples, such as `VLLMRollout`; None for the tensors that train. One with weights of its
            own gets those of a session before it samples from them, and they are verified.
        shape: which layers the adapter has; see `AdapterShape`.
    Attributes:
        updates: optimizer steps made.
    Raises:
        ConfigError: the model cannot be loaded or trained.
    """

    def __init__(
        self,
        model: str | Path | ModelSource,
        rank: int = 32,
        *,
        seed: int = 0,
        device: str = "auto",
        autocast: Autocast = None,
        micro_batch_tokens: int = 16384,
        rollout: Rollout | None = None,
        **shape: Any,
    ):
        source = model if isinstance(model, ModelSource) else Pretrained(path=str(model))
        if device == "auto":
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        base = BaseModel(source, device, autocast, micro_batch_tokens, rollout=rollout)
        self._start(base, AdapterShape(rank=rank, seed=seed, **shape), seed, threading.RLock())
        self._closes_base = True

    @classmethod
    def on(cls, base: BaseModel, shape: AdapterShape, seed: int, lock: Any) -> TrainingSession:
        """A session on a base model that is loaded already, with the lock of all its sessions."""
        session = cls.__new__(cls)
        session._start(base, shape, seed, lock)
        return session

    _numbers = itertools.count()
    _closes_base = False

    def _start(self, base: BaseModel, shape: AdapterShape, seed: int, lock: Any) -> None:
        self.base, self.shape, self.seed, self._lock = base, shape, seed, lock
        self.name, self._samplings, self._has_gradients = f"session_{next(self._numbers)}", 0, False
        with lock:
            self.engine = base.add(self.name, shape)

    def another(self, rank: int = 32, *, seed: int = 0, **shape: Any) -> TrainingSession:
        """One more adapter on the same base model, independent of this one."""
        session = self.on(self.base, AdapterShape(rank=rank, seed=seed, **shape), seed, self._lock)
        session._closes_base = self._closes_base
        return session

    @property
    def updates(self) -> int:
        return self.engine.updates

    @property
    def tokenizer(self) -> Any:
        return self.base.tokenizer

    # Training

    def forward(self, data: Sequence[Datum], loss: str = "cross_entropy", **settings: float) -> LossOutput:
        """The loss of data and the log-probs of their targets, without gradients.

        Args, Raises: see `forward_backward`.
        """
        kind, values, rows = self._rows(data, loss, settings)
        with self._lock:
            scores = self._active().infer(rows.batch, lambda model, micro: self._scores(model, micro, rows))
            log_probs = torch.stack([scores[str(k)] for k in range(rows.num_targets or 1)], dim=-1)
            log_probs = log_probs if rows.num_targets is not None else log_probs[..., 0]
            per_token = kind.per_token(log_probs, _as(rows.inputs, log_probs), values)
        mask = rows.batch["response_mask"]
        per_token = per_token * (mask if per_token.dim() == 2 else mask[..., None])
        return _output(log_probs, per_token, rows)

    def forward_backward(self, data: Sequence[Datum], loss: str = "cross_entropy", **settings: float) -> LossOutput:
        """Add the gradient of the loss of data to that of earlier calls since the last `optim_step`.

        Args:
            data: rows of tokens with targets and the inputs of the loss.
            loss: a name of `verl.service.losses.LOSSES`: cross_entropy, importance_sampling, ppo, cispo, gspo, dro.
            settings: of the loss, such as `clip_low_threshold`.
        Raises:
            ConfigError: the data do not fit the loss or the model; names the datum.
        """
        kind, values, rows = self._rows(data, loss, settings)
        shape = rows.batch["responses"].shape if rows.num_targets is None else rows.batch[CANDIDATES].shape
        found: dict[str, Tensor] = {}

        def loss_of_one(model: nn.Module, micro: MicroBatch, _: LossTotals) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs = self._log_probs(model, micro, rows)
            width, at = micro.response_width, micro.rows.cpu()
            inputs = {name: x[at, :width].to(log_probs.device) for name, x in rows.inputs.items()}
            mask = micro.tensors["response_mask"]
            per_token = kind.per_token(log_probs, _as(inputs, log_probs), values)
            per_token = torch.where(mask if per_token.dim() == 2 else mask[..., None], per_token, 0.0)
            for name, x in (("log_probs", log_probs), ("per_token", per_token)):
                whole = found.setdefault(name, torch.zeros(shape, dtype=x.dtype))
                whole[at, :width] = x.detach().cpu()
            return per_token.sum(), {}

        with self._lock:
            self._has_gradients = False  # until this call has succeeded, as in the engine
            self._active().forward_backward(rows.batch, loss_of_one)
            self._has_gradients = True
        return _output(found["log_probs"], found["per_token"], rows)

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
            max_grad_norm: gradients of a larger L2 norm are scaled down to it; None for no clipping.
        Returns:
            `grad_norm` before clipping, `lr`, `loss`, the sum of the losses; a step of which one is not finite is
            skipped, and its `is_skipped` is 1.
        Raises:
            ConfigError: a value is out of its range.
            NoGradients: `forward_backward` was not called before.
        """
        finite(lr, "learning_rate")
        first, second = (finite(beta, f"beta{i}", high=1.0) for i, beta in enumerate(betas, 1))
        finite(eps, "eps")
        finite(weight_decay, "weight_decay")
        limit = None if not max_grad_norm else finite(max_grad_norm, "grad_clip_norm")
        with self._lock:
            if not self._has_gradients:
                raise NoGradients("optim_step has no gradients: call forward_backward before each optim_step.")
            self._has_gradients = False
            engine, before = self._active(), self.engine.updates
            engine.optimizer_config = dataclasses.replace(engine.optimizer_config, lr=float(lr), max_grad_norm=limit)
            for group in engine.optimizer.param_groups:
                decay = weight_decay if group["params"][0].ndim > 1 else 0.0
                group.update(betas=(first, second), eps=float(eps), weight_decay=decay)
            metrics = engine.optim_step()
        return {**metrics, "is_skipped": float(engine.updates == before)}

    def _rows(self, data: Sequence[Datum], loss: str, settings: Mapping[str, Any]) -> tuple[Loss, Settings, LossRows]:
        kind, values = loss_of(loss, settings)
        return kind, values, loss_rows(data, kind, self.base.vocabulary, self.base.longest)

    def _active(self) -> Any:
        return self.base.engine_of(self.name)

    def _log_probs(self, model: nn.Module, micro: MicroBatch, rows: LossRows) -> Tensor:
        """Log-probs of the targets of a micro-batch, [b t] or [b t K]."""
        wanted = None if rows.num_targets is None else CANDIDATES
        scores = token_log_probs(model, self.base.head, micro, candidates=wanted)
        found = scores.log_probs if wanted is None else scores.candidate_log_probs
        assert found is not None
        return found

    def _scores(self, model: nn.Module, micro: MicroBatch, rows: LossRows) -> dict[str, Tensor]:
        log_probs = self._log_probs(model, micro, rows)
        columns = [log_probs] if rows.num_targets is None else log_probs.unbind(dim=-1)
        return {str(k): x for k, x in enumerate(columns)}

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
        chosen = SamplingOptions(**options).checked("sampling_params", self.base.vocabulary)
        with self._lock, self.base.sampling_from(self.name) as engine:
            self._samplings += 1
            noise = (self.seed, "call", self._samplings) if seed is None else (seed,)
            requests = [PromptRequest(tokens, num_samples, noise) for tokens in prompts]
            return sample(engine, self.tokenizer, requests, chosen, self.base.longest)

    # State

    def weights(self) -> dict[str, Tensor]:
        """A copy of the trained weights, by their names in peft's file."""
        with self._lock:
            return self.base.weights(self.name)

    def save(self, directory: str | Path) -> None:
        """Write weights, optimizer and counters to a new directory, which appears whole or not at all.

        It is a directory of peft with two more files.

        Raises:
            ConfigError: the directory exists.
        """
        with self._lock:
            optimizer = dict(self.engine.optimizer_tensors())
            state = saved.SavedSession(
                self.shape,
                self.base.weights(self.name),
                optimizer,
                self.engine.updates,
                self._samplings,
                self.base.digest,
            )
            saved.write(state, Path(directory), self.base, self.name)

    def load(self, directory: str | Path, optimizer: bool = True) -> None:
        """Continue from a saved session: the same calls then give the same bits as in the one that was saved.

        Gradients of this session are dropped.

        Args:
            optimizer: also load the optimizer; without it the next step is as the first one.
        Raises:
            ConfigError: the directory holds no session of this shape, or is damaged; this session is unchanged.
        """
        state = saved.read(Path(directory))
        if dataclasses.replace(state.shape, seed=0) != dataclasses.replace(self.shape, seed=0):
            raise ConfigError(f"{directory} holds a session of {state.shape}, and this one is of {self.shape}.")
        if optimizer and not state.has_optimizer:
            raise ConfigError(f"{directory} holds weights for sampling, without an optimizer: load the weights alone.")
        if state.base != self.base.digest:
            raise ConfigError(f"{directory} holds an adapter of another base model.")
        with self._lock:
            engine = self._active()
            self.base.set_weights(self.name, state.weights)
            engine.release()
            self._has_gradients = False
            engine.optimizer.state.clear()
            if optimizer:
                engine.load_optimizer(state.optimizer, state.updates)
                self._samplings = state.samplings
            else:
                engine.updates = 0

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        with self._lock:
            self._active().release()
            self._has_gradients = False

    def close(self) -> None:
        """Free the adapter, and with the last one the process of a sampling engine."""
        with self._lock:
            self.base.remove(self.name)
            if self._closes_base and not self.base.has_engines:
                self.base.close()

    def __enter__(self) -> TrainingSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as(inputs: Mapping[str, Tensor], log_probs: Tensor) -> dict[str, Tensor]:
    return {name: x.to(log_probs) for name, x in inputs.items()}


def _output(log_probs: Tensor, per_token: Tensor, rows: LossRows) -> LossOutput:
    of_rows = [(log_probs[i, :n], per_token[i, :n]) for i, n in enumerate(rows.lengths)]
    return LossOutput(float(per_token.double().sum()), [x for x, _ in of_rows], [x for _, x in of_rows])
