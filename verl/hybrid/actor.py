"""HybridActor: one set of weights that is trained by your own loop and generates through verl's rollout engines.

forward, backward, step ──> the weights <── generate
      any optimizer        (one tensor each)   `rollout.hf`: the role's own engine
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl import config
from verl.component import BuildContext
from verl.compose.from_yaml import described, load_rollout
from verl.errors import ConfigError, faults_below
from verl.hybrid.generate_options import CallTokenizer, prompt_rows, read_options, sampling_options, seed_of_call
from verl.hybrid.parallel import HybridConfig, HybridParallelism, hybrid_parallelism
from verl.model_paths.check import forget
from verl.models.images import save_tokenizer
from verl.models.interfaces import check_interface
from verl.models.lora import LoRA
from verl.models.parallel_info import compute_device, parallel_info_of, release_gathered
from verl.models.pretrained import Pretrained, quiet_transformers
from verl.rollout.base import SAME_TENSORS, GenerationRequest, Rollout, RolloutEngine, SyncResult
from verl.rollout.generation_group import from_first
from verl.rollout.responses import ResponseGenerator
from verl.utils.memory import refuse_device, release_cached
from verl.workers.base import load_unsharded

if TYPE_CHECKING:
    from transformers import GenerationConfig

_log = logging.getLogger(__name__)


class HybridActor:
    """A Hugging Face causal language model that trains and generates without copying or reloading weights.

        actor = HybridActor.from_pretrained("Qwen/Qwen2-0.5B")
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
        texts = actor.generate(input_ids=ids, do_sample=True, max_new_tokens=64)     # samples from the same weights
        actor(input_ids=texts, labels=texts).loss.backward()                         # that this line trains
        optimizer.step()

    `generate` switches the model to evaluation, synchronises the engine with the current weights, and restores the
    model's state afterwards. The model may change between calls, unless it is sharded by `hybrid_config`; what was
    checked of it is checked again once `model` is set. Calls from several threads wait for each other.

    Args:
        model: a loaded model; `from_pretrained` loads one.
        tokenizer: saved with the weights; its pad token is the padding of finished rows.
        hybrid_config: keys of `HybridConfig`.
        rollout: the engine: name of an option of the group `rollout`, or a component. `hf` samples from the model
            itself.
        lora: train a LoRA adapter and freeze the model: a `LoRA`, or a mapping of its keys.
        seed: of the sampling noise.
        contiguous: copy parameters that are not contiguous in memory, instead of refusing them.
        auto_cache_clear: empty the caching allocator of a GPU after generation; keys and values are freed in any case.
            None follows `verl.config.auto_cache_clear`.

    Attributes:
        model: the Hugging Face model, with its adapter if it has one. Can be set, unless it is sharded.
        rollout: the component of the engine. Can be set, also by name.
        tokenizer, seed, contiguous, auto_cache_clear: see the arguments; can be set.
        hybrid_config: how it is sharded, as a `HybridConfig`.

    Raises:
        ConfigError: the model cannot be an actor, a key is unknown, or a setting is not supported.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        hybrid_config: HybridConfig | Mapping[str, Any] | None = None,
        rollout: str | Rollout = "hf",
        lora: LoRA | Mapping[str, Any] | None = None,
        seed: int = 0,
        *,
        contiguous: bool = False,
        auto_cache_clear: bool | None = None,
        _parallelism: HybridParallelism | None = None,  # by which `from_pretrained` has loaded the model
    ):
        config = described(HybridConfig, "hybrid_config", hybrid_config)
        self.contiguous = contiguous or config.contiguous
        self.auto_cache_clear = config.auto_cache_clear if auto_cache_clear is None else auto_cache_clear
        self.hybrid_config, self.tokenizer, self.seed, self._lock = config, tokenizer, seed, threading.RLock()
        self._rollout = load_rollout(rollout)
        adapter = None if lora is None else described(LoRA, "lora", lora)
        if (parallelism := _parallelism) is None:
            _refuse_no_actor(model)
            if (parallelism := hybrid_parallelism(config, str(model.device))) is not None:
                parallelism.broadcast(model.state_dict(keep_vars=True).values())
        self._parallelism = parallelism
        self._model: Any = model if adapter is None else adapter.apply(model, causal_lm=True)
        self._engine: tuple[Any, Any] | None = None  # with the settings that it was attached for
        self._check_contiguous()
        if parallelism is not None:
            if adapter is not None:  # drawn in each process
                parallelism.broadcast(p for p in self.model.parameters() if p.requires_grad)
            parallelism.take(self.model)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        hybrid_config: HybridConfig | Mapping[str, Any] | None = None,
        rollout: str | Rollout = "hf",
        lora: LoRA | Mapping[str, Any] | None = None,
        *,
        device: str = "auto",
        seed: int = 0,
        contiguous: bool = False,
        auto_cache_clear: bool | None = None,
        **source: Any,
    ) -> HybridActor:
        """Load a model and its tokenizer from a directory made by `save_pretrained`, or from the hub.

        Args:
            name_or_path: directory or hub name.
            hybrid_config, rollout, lora, seed, contiguous, auto_cache_clear: see the class.
            device: `auto` for a GPU if there is one.
            source: further keys of `Pretrained`, such as `dtype`, `attention`, `revision`.
        """
        config = described(HybridConfig, "hybrid_config", hybrid_config)  # before weights are loaded
        pretrained = described(Pretrained, "from_pretrained", {"path": str(name_or_path), **source})
        if device == "auto":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        refuse_device(device, "from_pretrained.device")
        parallelism = hybrid_parallelism(config, device)
        with faults_below("from_pretrained"):
            if parallelism is None:
                model = pretrained.load_causal_lm(device)
            else:
                model = load_unsharded(pretrained, "causal_lm", device, parallelism, sliced=lora is None)
            tokenizer = pretrained.load_tokenizer()
        options: dict[str, Any] = {"contiguous": contiguous, "auto_cache_clear": auto_cache_clear}
        return cls(model, tokenizer, config, rollout, lora, seed, **options, _parallelism=parallelism)

    # What may be replaced

    @property
    def model(self) -> Any:
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        with self._lock:
            _refuse_no_actor(model)
            if self._parallelism is not None:
                raise ConfigError("model cannot be replaced: it is sharded over processes. Make a new HybridActor.")
            self._model = model
            forget(model)
            self._end_engine()

    @property
    def rollout(self) -> Rollout:
        return self._rollout

    @rollout.setter
    def rollout(self, rollout: str | Rollout) -> None:
        with self._lock:
            self._rollout = load_rollout(rollout)
            self._end_engine()

    # Training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward: `actor(input_ids=..., attention_mask=..., labels=...).loss`."""
        with self._lock:
            if self._engine is not None:
                self._engine[1].offload()  # an engine with its own weights frees memory for training
            if self._parallelism is not None:
                self._parallelism.refuse_other_rows(kwargs.get("input_ids", args[0] if args else None))
            return self.model(*args, **kwargs)

    forward = __call__

    def train(self, mode: bool = True) -> HybridActor:
        """Set training mode, as for torch modules; not needed for `generate`."""
        with self._lock:
            self.model.train(mode)
        return self

    def eval(self) -> HybridActor:
        return self.train(False)

    @property
    def training(self) -> bool:
        with self._lock:
            return self.model.training

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        return compute_device(self.model)

    @property
    def process_group(self) -> Any:
        """Process group of this actor, for `check_process_groups`; None for a single process."""
        return None if self._parallelism is None else torch.distributed.group.WORLD

    # Weights; for a sharded actor local parts as DTensors

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._settled().parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._settled().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._settled().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._settled().load_state_dict(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients to a global norm of `max_norm` over all processes; returns the norm before clipping."""
        with self._lock:
            if self._parallelism is not None:
                return self._parallelism.clip(self.parameters(), max_norm)
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def _settled(self) -> Any:
        if self._parallelism is not None:
            with self._lock:
                release_gathered(self.model)
        return self.model

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a Hugging Face directory (with LoRA: a peft adapter directory), with the tokenizer if there is one.

        For a sharded actor all processes must call it, and the first writes.
        """
        with self._lock, quiet_transformers():
            if self._parallelism is not None:
                self._parallelism.save(self._settled(), self.tokenizer, directory)
                return
            self.model.save_pretrained(directory)
        save_tokenizer(self.tokenizer, directory)

    # Generation

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Tensor:
        """Generate responses, with the arguments of transformers.

        Greedy responses equal those of transformers. Sampled ones follow the same distribution with counter-based
        noise, a function of (seed of the actor, seed of the call, row, sample, position), so a row does not depend on
        others.

        Args:
            input_ids: [B P], padded on the left.
            attention_mask: [B P]; None if pad tokens mark padding.
            seed: of this call; None to draw one from `generator`, or from torch's global generator.
            generator: see `seed`.
            options: max_new_tokens, max_length, min_new_tokens, do_sample, temperature, top_k, top_p,
                num_return_sequences, eos_token_id, pad_token_id.
        Returns:
            [B * num_return_sequences, P + T]: prompts with their responses; samples of one prompt are consecutive.
        Raises:
            ConfigError: an unknown option, an invalid value, or a model that the engine cannot sample from.
        """
        with self._lock:
            width = input_ids.shape[-1] if isinstance(input_ids, Tensor) else 0
            config = read_options(options, self.model, self.tokenizer, width)
            prompts = prompt_rows(input_ids, attention_mask, config)
            number = seed_of_call(config, seed, generator)
            if self._parallelism is not None:
                self._parallelism.refuse_changes(self.model)
                self._parallelism.refuse_other_rows(input_ids)
                number = from_first(parallel_info_of(self.model), number)
            request = GenerationRequest(number, config.num_return_sequences, not config.do_sample)
            with self.sampling():
                responses = self._generator_for(config)
                responses.sync()
                rows = responses.generate(prompts, request)
            return rows["input_ids"].to(input_ids.device)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside this context modules are in evaluation mode; on exit the mode of each module is restored."""
        with self._lock:
            self._check_contiguous()
            training = [module for module in self.model.modules() if module.training]
            self.model.eval()
            try:
                yield
            finally:
                for module in training:
                    module.training = True
                if config.auto_cache_clear if self.auto_cache_clear is None else self.auto_cache_clear:
                    release_cached(self.device, always=True)

    def _check_contiguous(self) -> None:
        """Refuse (or copy) parameters that are not contiguous; engines and checkpoints copy contiguous memory."""
        if names := [name for name, p in self.model.named_parameters() if not p.is_contiguous()]:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            if not self.contiguous:
                raise ConfigError(
                    f"model has parameters that are not contiguous in memory: {shown}. Give contiguous=True to have "
                    "them copied."
                )
            for name in names:
                parameter = self.model.get_parameter(name)
                parameter.data = parameter.data.contiguous()
            _log.info("made contiguous: %s", shown)

    def _generator_for(self, config: GenerationConfig) -> ResponseGenerator:
        """A generator with the options of a call; its engine is new if options are fixed at start."""
        described: Any = replace(self.rollout, **sampling_options(config))
        model, pad = _unwrapped(self.model), config.pad_token_id
        options = described.chosen_for(model)
        size = len(self.tokenizer) if hasattr(self.tokenizer, "__len__") else None
        fixed = None if options.may_change else options
        key = (config.eos_token_id, pad, self.device, fixed, self.tokenizer, size)
        if self._engine is None or self._engine[0] != key:
            self._end_engine()
            context = BuildContext(device=str(self.device))
            if (mesh := self._parallelism) is not None:
                context = BuildContext(device=str(mesh.device), rank=mesh.rank, world_size=mesh.world_size)
            own_stops = model.generation_config.eos_token_id
            model.generation_config.eos_token_id = config.eos_token_id  # an engine reads its stop tokens there
            try:
                tokenizer = CallTokenizer(self.tokenizer, pad)
                self._engine = (key, described.attach(model, tokenizer, self.seed, None, context))
            finally:
                model.generation_config.eos_token_id = own_stops
        engine = self._engine[1]
        if hasattr(engine, "seed"):
            engine.seed = self.seed  # type: ignore[attr-defined]
        if options.may_change:  # an engine in another process need not restart
            engine.options = options
        return ResponseGenerator(engine, options, pad)

    def sync(self) -> SyncResult:
        """Send the current weights to the engine, as `generate` also does; nothing to do if it uses the same
        tensors.
        """
        with self._lock:
            if self._engine is None:
                return SAME_TENSORS
            with self.sampling():  # verification compares with the model in evaluation mode
                return self._engine[1].sync()

    def close(self) -> None:
        """Stop an engine in another process; the next call starts it again."""
        with self._lock:
            self._end_engine()

    @property
    def rollout_engine(self) -> RolloutEngine | None:
        """The engine of `generate`, from its first call until `close` or a change that needs another one."""
        return None if self._engine is None else self._engine[1]

    def _end_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine[1].close()


def _refuse_no_actor(model: Any) -> None:
    if isinstance(model, (str, Path)):
        raise ConfigError(f"model is {str(model)!r}: expected a loaded model. HybridActor.from_pretrained loads one.")
    check_interface("actor", _unwrapped(model), "model")


def _unwrapped(model: Any) -> Any:
    """The module inside a `torch.compile` wrapper, with the same weights; other models unchanged."""
    return getattr(model, "_orig_mod", model) if isinstance(model, nn.Module) else model
