"""HybridActor: one set of weights that is trained by your own loop and generates through verl's rollout engines.

forward, backward, step ──> the weights <── generate
      any optimizer        (one tensor each)   `rollout.hf`: the role's own engine
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.component import BuildContext
from verl.compose.from_yaml import load_rollout
from verl.compose.suggestions import described
from verl.errors import ConfigError, RolloutError, WeightSyncError, faults_below
from verl.hybrid.generation_config import GenerateCall, naming_ends, prompt_rows, read_call, settings_left_out
from verl.hybrid.model_changes import (
    ActorLock,
    behaviour_of,
    form_difference,
    form_of,
    is_quantized,
    own_weights_fault,
    prompt_learning_fault,
    unwrapped,
    with_code_of_its_own,
)
from verl.hybrid.parallel import HybridConfig, HybridParallelism, hybrid_config_from, hybrid_parallelism, own_device
from verl.model_paths.check import forget
from verl.models.interfaces import check_interface
from verl.models.lora import LoRA
from verl.models.parallel_info import compute_device
from verl.models.pretrained import Pretrained, quiet_transformers
from verl.rollout.base import SAME_TENSORS, GenerationRequest, Rollout, RolloutEngine, SyncResult
from verl.rollout.responses import ResponseSampler
from verl.utils.memory import release_cached
from verl.workers.base import load_unsharded

_log = logging.getLogger(__name__)


class HybridActor:
    """A Hugging Face causal language model that trains and generates without copying or reloading weights.

        actor = HybridActor.from_pretrained("Qwen/Qwen2-0.5B")
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
        texts = actor.generate(input_ids=ids, do_sample=True, max_new_tokens=64)     # samples from the same weights
        actor(input_ids=texts, labels=texts).loss.backward()                         # that this line trains
        optimizer.step()

    `generate` switches the model to evaluation, synchronises the engine with the current weights, and restores the
    model's state afterwards, including accumulated gradients.

    The form of the model (parameters, classes of modules, configuration) is fixed when the actor is made. `generate`
    refuses a changed one until it is set: `actor.model = actor.model`. Weights, training mode, `requires_grad`, hooks
    and the switches of an adapter may change between calls. Calls from several threads are serialised.

    With several processes, which must make the same calls, the model is sharded by `hybrid_config`: docs/library.md.

    Args:
        model: a loaded model; `from_pretrained` loads one.
        tokenizer: saved with the weights; its pad token is the padding of finished rows.
        hybrid_config: keys of `HybridConfig`.
        rollout: the engine: name of an option of the group `rollout`, or a component. `hf` samples from the model
            itself.
        lora: train a LoRA adapter and freeze the model: a `LoRA`, or a mapping of its keys.
        seed: of the sampling noise.
        contiguous, auto_cache_clear: keys of `hybrid_config` as separate arguments.

    Attributes:
        model: the Hugging Face model, with its adapter if it has one. Can be set, unless it is sharded.
        tokenizer: the tokenizer or None. Can be set.
        rollout: the component of the engine. Can be set, also by name.
        seed: can be set.
        hybrid_config: the settings, as a `HybridConfig`; those that do not affect sharding can be set.

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
        contiguous: bool | None = None,
        auto_cache_clear: bool | None = None,
    ):
        self._hybrid_config = hybrid_config_from(hybrid_config, contiguous, auto_cache_clear)
        _refuse_no_actor(model)
        company = hybrid_parallelism(self.hybrid_config, str(model.device))
        if company is not None:
            company.refuse_other_weights(model)
        self._start(model, tokenizer, rollout, lora, seed, company)

    def _start(
        self, model: Any, tokenizer: Any, rollout: Any, lora: Any, seed: int, company: HybridParallelism | None
    ) -> None:
        self._lock = ActorLock()
        self._rollout = load_rollout(rollout)
        adapter = None if lora is None else described(LoRA, "lora", lora)
        with nullcontext() if company is None else company.same_random_numbers():
            self._model: Any = model if adapter is None else adapter.apply(model, causal_lm=True)
        self.tokenizer, self.seed, self._company = tokenizer, seed, company
        self._engine: tuple[Any, Any] | None = None  # with the settings that it was attached for
        self._behaviour: list[Any] | None = None  # of the model when checks passed
        self._settings_reported: dict[str, Any] = {}
        self._refuse_scattered()
        if company is not None:
            company.take(self.model)
        self._form = form_of(unwrapped(self._settled()))
        self._warn_unsupported_settings()

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
        contiguous: bool | None = None,
        auto_cache_clear: bool | None = None,
        **source: Any,
    ) -> HybridActor:
        """Load a model and its tokenizer from a directory made by `save_pretrained`, or from the hub.

        Args:
            name_or_path: directory or hub name.
            hybrid_config, rollout, lora, seed: see the class.
            device: `auto` for a GPU if there is one.
            contiguous, auto_cache_clear: keys of `hybrid_config` as separate arguments.
            source: further keys of `Pretrained`, such as `dtype`, `attention`, `revision`.
        """
        config = hybrid_config_from(hybrid_config, contiguous, auto_cache_clear)  # before weights are loaded
        chosen = described(Pretrained, "from_pretrained", {"path": str(name_or_path), **source})
        place = own_device() if device == "auto" else device
        company, actor = hybrid_parallelism(config, place), cls.__new__(cls)
        actor._hybrid_config = config
        with faults_below("from_pretrained"):
            if company is None:
                model = chosen.load_causal_lm(place)
            else:
                model = load_unsharded(chosen, "causal_lm", place, company, sliced=lora is None)
            tokenizer = chosen.load_tokenizer()
        actor._start(model, tokenizer, rollout, lora, seed, company)
        return actor

    # What may be replaced

    @property
    def model(self) -> Any:
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        with self._held("model = ..."):
            _refuse_no_actor(model)
            self._refuse_if_divided("model cannot be replaced")
            self._model, self._form, self._behaviour = model, form_of(unwrapped(model)), None
            forget(model)
            self._end_engine()

    @property
    def rollout(self) -> Rollout:
        return self._rollout

    @rollout.setter
    def rollout(self, rollout: str | Rollout) -> None:
        with self._held("rollout = ..."):
            self._rollout, self._behaviour = load_rollout(rollout), None
            self._end_engine()

    @property
    def hybrid_config(self) -> HybridConfig:
        return self._hybrid_config

    @hybrid_config.setter
    def hybrid_config(self, hybrid_config: HybridConfig | Mapping[str, Any] | None) -> None:
        config = described(HybridConfig, "hybrid_config", hybrid_config)
        for name in ("tp_size", "dp_size", "fsdp_sharding"):
            if (asked := getattr(config, name)) != (now := getattr(self._hybrid_config, name)):
                raise ConfigError(
                    f"hybrid_config.{name} is {asked}, but the actor was sharded with {now}: make a new HybridActor."
                )
        self._hybrid_config = config

    def _held(self, call: str) -> Any:
        return self._lock.held(call, self._hybrid_config.busy_timeout_s)

    def _refuse_if_divided(self, fault: str) -> None:
        if self._company is not None:
            raise ConfigError(
                f"{fault}: it is sharded over {self._company.world_size} processes. Make a new HybridActor."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridActor:
        with self._held("__deepcopy__"):
            made = type(self).__new__(type(self))
            made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """State without the engine, which a copy starts with its first call."""
        self._refuse_if_divided("an actor cannot be copied or pickled")
        left_out = dict.fromkeys(("_engine", "_behaviour"))
        return {name: value for name, value in vars(self).items() if name != "_lock"} | left_out

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = ActorLock()

    # Training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward: `actor(input_ids=..., attention_mask=..., labels=...).loss`."""
        with self._held("forward"):
            if self._engine is not None and hasattr(self._engine[1], "rest"):
                self._engine[1].rest()  # an engine with its own weights frees memory for training
            if self._company is not None:
                self._company.refuse_other_rows(kwargs.get("input_ids", args[0] if args else None))
            return self.model(*args, **kwargs)

    forward = __call__

    def train(self, mode: bool = True) -> HybridActor:
        """Set training mode, as for torch modules; not needed for `generate`."""
        with self._held("train"):
            self.model.train(mode)
        return self

    def eval(self) -> HybridActor:
        return self.train(False)

    @property
    def training(self) -> bool:
        with self._held("training"):
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
        return None if self._company is None else torch.distributed.group.WORLD

    # Weights; for a sharded actor local parts as DTensors

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._settled().parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._settled().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._settled().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self._held("load_state_dict"):
            return self._settled().load_state_dict(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients to a global norm of `max_norm` over all processes; returns the norm before clipping."""
        with self._held("clip_grad_norm_"):
            if self._company is not None:
                return self._company.clip(self.parameters(), max_norm)
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def _settled(self) -> Any:
        if self._company is not None:
            with self._held("parameters"):
                self._company.settle(self.model)
        return self.model

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a Hugging Face directory (with LoRA: a peft adapter directory), with the tokenizer if there is one.

        For a sharded actor all processes must call it, and the first writes.
        """
        with self._held("save_pretrained"), quiet_transformers():
            if self._company is not None:
                self._company.save(self.model, self.tokenizer, directory)
                return
            self.model.save_pretrained(directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)

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
            ActorBusy: a call of another thread took longer than `hybrid_config.busy_timeout_s`.
            RolloutError: another thread changed the weights meanwhile.
        """
        with self._held("generate"):
            try:
                return self._generate(input_ids, attention_mask, seed, generator, options)
            except ConfigError as error:
                if "quantized" in str(error) or not is_quantized(unwrapped(self.model)):
                    raise
                text = "model is quantized: if scales are computed over a batch, a row depends on the other rows."
                raise ConfigError([*error.faults, text]) from error

    def _generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        seed: int | None,
        generator: torch.Generator | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        self._check_model()
        width = input_ids.shape[-1] if isinstance(input_ids, Tensor) else 0
        call = read_call(options, self.model, self.tokenizer, width)
        prompts = prompt_rows(input_ids, attention_mask, call)
        number, company = _number(call, seed, generator), self._company
        if company is not None:
            company.refuse_other_rows(input_ids)
            number = company.agreed(number)
        request = GenerationRequest(number, call.num_samples, call.greedy)
        with self.sampling():
            written = self._times_written()
            rows = self._synced_sampler_for(call).generate(prompts, request)
            if self._times_written() != written:
                raise RolloutError(
                    "the weights were changed during generation, by an optimizer step or a load in another thread: the "
                    "responses do not belong to one set of weights. Use one thread for both, or protect both by a "
                    "lock."
                )
        return rows["input_ids"].to(input_ids.device)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside this context modules are in evaluation mode; on exit the mode of each module is restored."""
        with self._held("sampling"):
            self._refuse_scattered()
            training = [module for module in self.model.modules() if module.training]
            self.model.eval()
            try:
                yield
            finally:
                for module in training:
                    module.training = True
                if self.hybrid_config.clears_cache:
                    release_cached(self.device)

    def _check_model(self) -> None:
        """Compare the model with its form, and repeat checks if its hooks or adapters were switched.

        Raises:
            ConfigError: the form is another, or the engine cannot reproduce the model.
        """
        model = unwrapped(self._settled())
        if difference := form_difference(self._form, form_of(model)):
            fault = f"model has changed ({difference})"
            self._refuse_if_divided(fault)
            raise ConfigError(
                f"{fault}, and its form is fixed when the actor is made. Set `actor.model = actor.model` to go on with "
                "the changed model."
            )
        self._warn_unsupported_settings()
        behaviour = behaviour_of(model)
        if behaviour != self._behaviour:
            if self._behaviour is not None:
                forget(model)
                if not self._holds_weights() or getattr(self._rollout, "lora", "merged") == "adapter":
                    self._end_engine()
            self._refuse_unfit()
        self._behaviour = behaviour

    def _holds_weights(self) -> bool:
        """Whether the engine has its own copy of the weights."""
        return self._rollout.chosen_for(unwrapped(self.model)).runs_ahead

    def _refuse_unfit(self) -> None:
        if self._company is None and self._holds_weights() and getattr(self._rollout, "weights", None) != "fixed":
            sends_adapter = getattr(self._rollout, "lora", "merged") == "adapter"
            if (fault := own_weights_fault(unwrapped(self.model), sends_adapter)) is not None:
                raise ConfigError(fault)

    def _times_written(self) -> int:
        """Number of in-place writes to tensors of the model, by torch's version counters."""
        if self._company is not None:  # gathering writes to them too
            return 0
        return sum(p._version for p in self.model.parameters() if not p.is_inference())

    def _warn_unsupported_settings(self) -> None:
        """Warn once about each unsupported setting in the model's generation configuration."""
        found = settings_left_out(self.model)
        new = {name: value for name, value in found.items() if self._settings_reported.get(name) != value}
        self._settings_reported = found
        if new:
            text = ", ".join(f"{name}={value}" for name, value in new.items())
            _log.warning("the generation configuration of the model has %s, which is not supported here.", text)

    def _synced_sampler_for(self, call: GenerateCall) -> ResponseSampler:
        """A sampler whose engine is synchronised with the current weights.

        Raises:
            ConfigError: the model runs user code that the engine does not.
        """
        sampler = self._sampler_for(call)
        try:
            sampler.sync()
        except WeightSyncError as error:
            if not error.faults and (names := with_code_of_its_own(unwrapped(self.model))):
                raise ConfigError(
                    f"model has hooks, or a forward set on the object, at {', '.join(names[:3])}: the rollout engine "
                    f"does not run them, and its log-probs differ by {error.gap_nats:.1e} nats. Remove "
                    "them, or set rollout='hf', which samples from the model itself."
                ) from error
            raise
        return sampler

    def _sampler_for(self, call: GenerateCall) -> ResponseSampler:
        """A sampler with the options of a call; its engine is a new one if options are fixed at start."""
        asked: Any = replace(self.rollout, **call.sampling)
        model = unwrapped(self.model)
        options = asked.chosen_for(model)
        size = len(self.tokenizer) if hasattr(self.tokenizer, "__len__") else None
        key = (call.stops, call.pad, self.device, None if options.may_change else options, self.tokenizer, size)
        if self._engine is None or self._engine[0] != key:
            self._end_engine()
            with naming_ends(model, self.tokenizer, call) as tokenizer:
                self._engine = (key, asked.attach(model, tokenizer, self.seed, None, self._context()))
        engine = self._engine[1]
        if hasattr(engine, "seed"):
            engine.seed = self.seed  # type: ignore[attr-defined]
        if options.may_change:  # an engine in another process need not restart
            engine.options = options
        return ResponseSampler(engine, options, call.pad)

    def _context(self) -> BuildContext:
        """Build context for the engine of this process."""
        device, company = str(self.device), self._company
        if company is None:
            return BuildContext(device=device)
        return BuildContext(device=str(company.device), rank=company.rank, world_size=company.world_size)

    def sync(self) -> SyncResult:
        """Send the current weights to the engine, as `generate` also does; nothing to do if it uses the same
        tensors.
        """
        with self._held("sync"):
            if self._engine is None:
                return SAME_TENSORS
            if not self._holds_weights():
                return self._engine[1].sync()
            self._check_model()
            with self.sampling():  # verification compares with the model in evaluation mode
                return self._engine[1].sync()

    def close(self) -> None:
        """Stop an engine in another process; the next call starts it again."""
        with self._held("close"):
            self._end_engine()

    @property
    def rollout_engine(self) -> RolloutEngine | None:
        """What `generate` draws with, from its first call until `close` or a change that needs another one."""
        return None if self._engine is None else self._engine[1]

    def _end_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and hasattr(engine[1], "close"):
            engine[1].close()

    def _refuse_scattered(self) -> None:
        """Refuse (or copy) parameters that are not contiguous; engines and checkpoints copy contiguous memory."""
        scattered = {name: p for name, p in self.model.named_parameters() if not p.is_contiguous()}
        if not scattered:
            return
        names = ", ".join(list(scattered)[:3]) + (f" and {len(scattered) - 3} more" if len(scattered) > 3 else "")
        if not self.hybrid_config.contiguous:
            raise ConfigError(
                f"model has parameters that are not contiguous in memory: {names}. Set "
                "hybrid_config={'contiguous': True} to have them copied."
            )
        for parameter in scattered.values():
            parameter.data = parameter.data.contiguous()
        _log.info("made contiguous: %s", names)


def _refuse_no_actor(model: Any) -> None:
    if isinstance(model, (str, Path)):
        raise ConfigError(f"model is {str(model)!r}: expected a loaded model. HybridActor.from_pretrained loads one.")
    if (fault := prompt_learning_fault(model)) is not None:
        raise ConfigError(fault)
    check_interface("actor", unwrapped(model), "model")


def _number(call: GenerateCall, seed: int | None, generator: torch.Generator | None) -> int:
    """The seed of a call; greedy calls do not use a generator."""
    if seed is not None or call.greedy:
        return seed or 0
    return int(torch.randint(2**62, (), generator=generator, device=None if generator is None else generator.device))
