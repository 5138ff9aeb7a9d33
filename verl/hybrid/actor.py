"""HybridActor: one set of weights that trains by your own loop and generates through verl's rollout engines.

forward, backward, step ──> the weights <── generate
      any optimizer        (one tensor each)   `rollout.hf`: the role's own engine
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.compose.keywords import described
from verl.compose.option import named_rollout
from verl.description import BuildContext
from verl.errors import ConfigError
from verl.hybrid.call import Call, prompt_rows, read_call, warn_of_settings_left_out
from verl.hybrid.ends import naming_ends
from verl.hybrid.processes import Company, company_of, own_device
from verl.hybrid.settings import HybridConfig
from verl.models.interfaces import check_interface
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained, quiet_transformers
from verl.rollout.base import SAME_TENSORS, Request, Rollout, RolloutEngine, Synced
from verl.utils.device_memory import release_cached
from verl.workers.training import undivided

_log = logging.getLogger(__name__)


class HybridActor:
    """A causal language model of Hugging Face that trains and generates, with nothing copied or loaded in between.

        actor = HybridActor.from_pretrained("Qwen/Qwen2-0.5B")
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
        texts = actor.generate(input_ids=ids, do_sample=True, max_new_tokens=64)     # samples from the very weights
        actor(input_ids=texts, labels=texts).loss.backward()                         # that this trains
        optimizer.step()

    States are switched by need: `generate` puts the model into the state that sampling wants, gives the engine the
    present weights, and leaves the model as it found it, gradients that wait for their step included.

    In several processes, all of which make the same calls, it is divided as `hybrid_config` says: docs/library.md.

    Args:
        model: a loaded model. See `from_pretrained` for one that has to be loaded.
        tokenizer: saved with the weights; its pad token fills rows that have ended.
        hybrid_config: keys of `HybridConfig`.
        rollout: the engine: an option of the group `rollout`, or a description of one. `hf` samples on the weights
            themselves.
        lora: train a low-rank adapter and leave the model frozen: a `LoRA`, or a mapping of its keys.
        seed: of the noise that samples are drawn with.

    Attributes:
        model: the Hugging Face model, with its adapter if it has one.
        tokenizer: or None.
        hybrid_config: the settings, as a `HybridConfig`.

    Raises:
        ConfigError: the model lacks what an actor offers, a key is unknown, or this version cannot do what it asks for.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        hybrid_config: HybridConfig | Mapping[str, Any] | None = None,
        rollout: str | Rollout = "hf",
        lora: LoRA | Mapping[str, Any] | None = None,
        seed: int = 0,
    ):
        self.hybrid_config = described(HybridConfig, "hybrid_config", hybrid_config)
        if isinstance(model, (str, Path)):
            raise ConfigError(
                f"model is {str(model)!r}: expected a loaded model. HybridActor.from_pretrained loads one."
            )
        check_interface("actor", model, "model")
        company = company_of(self.hybrid_config, str(model.device))
        if company is not None:
            company.refuse_other_weights(model)
        self._start(model, tokenizer, rollout, lora, seed, company)

    def _start(self, model: Any, tokenizer: Any, rollout: Any, lora: Any, seed: int, company: Company | None) -> None:
        self.rollout = named_rollout(rollout)
        adapter = None if lora is None else described(LoRA, "lora", lora)
        with nullcontext() if company is None else company.drawing_alike():
            self.model: Any = model if adapter is None else adapter.apply(model, causal_lm=True)
        self.tokenizer, self.seed, self._company = tokenizer, seed, company
        self._engine: tuple[Any, Any] | None = None  # with what it was attached for
        self._refuse_scattered()
        if company is not None:
            company.take(self.model)
        warn_of_settings_left_out(self.model)

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
        **source: Any,
    ) -> HybridActor:
        """Load a model and its tokenizer from a directory made by `save_pretrained`, or from the hub.

        Args:
            device: `auto` takes a GPU where there is one.
            source: further keys of `Pretrained`, such as `dtype`, `attention`, `revision`.
        """
        config = described(HybridConfig, "hybrid_config", hybrid_config)  # before weights are loaded
        chosen = described(Pretrained, "from_pretrained", {"path": str(name_or_path), **source})
        place = own_device() if device == "auto" else device
        company, actor = company_of(config, place), cls.__new__(cls)
        actor.hybrid_config = config
        if company is None:
            model = chosen.load_causal_lm(place)
        else:
            model = undivided(chosen, "causal_lm", place, company, sliced=lora is None)
        actor._start(model, chosen.load_tokenizer(), rollout, lora, seed, company)
        return actor

    # Training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward: `actor(input_ids=..., attention_mask=..., labels=...).loss`."""
        if self._engine is not None and hasattr(self._engine[1], "rest"):
            self._engine[1].rest()  # an engine with weights of its own leaves the memory to training
        if self._company is not None:
            self._company.refuse_other_rows(kwargs.get("input_ids", args[0] if args else None))
        return self.model(*args, **kwargs)

    forward = __call__

    def train(self, mode: bool = True) -> HybridActor:
        """As of any torch module; never needed for `generate`."""
        self.model.train(mode)
        return self

    def eval(self) -> HybridActor:
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.model.training

    @property
    def config(self) -> Any:
        """The model's own."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def process_group(self) -> Any:
        """All processes that hold this actor, for `check_process_groups`; None where it is whole in one."""
        return None if self._company is None else torch.distributed.group.WORLD

    # Weights; of an actor that is divided, this process's part, as DTensors

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._settled().parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._settled().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._settled().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._settled().load_state_dict(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients down to a norm of `max_norm` over all weights of all processes; gives the norm before."""
        if self._company is not None:
            return self._company.clip(self.parameters(), max_norm)
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def _settled(self) -> Any:
        if self._company is not None:
            self._company.settle(self.model)
        return self.model

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a Hugging Face directory (with LoRA: a peft adapter directory), with the tokenizer if there is one.

        Of a divided actor the first process writes it; all of them call this.
        """
        with quiet_transformers():
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
        """Responses to prompts, by the arguments of transformers.

        Greedy responses are those of transformers. Drawn ones come from the same distribution by noise of our own: a
        function of (the actor's seed, the call's, row, sample, position), so a row does not depend on its neighbours.

        Args:
            input_ids: [B P], padded on the left.
            attention_mask: [B P]; without one, pad tokens are padding.
            seed: of this call; else a number is taken from `generator`, or from torch's global generator.
            options: max_new_tokens, max_length, min_new_tokens, do_sample, temperature, top_k, top_p,
                num_return_sequences, eos_token_id, pad_token_id.
        Returns:
            [B * num_return_sequences, P + T]: prompts with their responses, the samples of a prompt side by side.
        Raises:
            ConfigError: an option that is not known here, or a value that cannot be.
        """
        width = input_ids.shape[-1] if isinstance(input_ids, Tensor) else 0
        call = read_call(options, self.model, self.tokenizer, width)
        prompts = prompt_rows(input_ids, attention_mask, call)
        number, company = _number(call, seed, generator), self._company
        if company is not None:
            company.refuse_other_rows(input_ids)
            number = company.agreed(number)
        request = Request(number, call.num_samples, call.greedy)
        with self.sampling():
            engine = self._engine_for(call)
            self.sync()
            rows = engine.generate(prompts, request)
        return rows["input_ids"].to(input_ids.device)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """The state that sampling wants; what was before comes back, module by module, whatever happens within."""
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

    def _engine_for(self, call: Call) -> RolloutEngine:
        """The engine, drawing as the call says; another one where responses end otherwise, or where it must know."""
        asked: Any = replace(self.rollout, **call.sampling)
        options = asked.chosen_for(self.model)
        key = (call.stops, call.pad, self.device, None if options.may_change else options)
        if self._engine is None or self._engine[0] != key:
            self.close()
            with naming_ends(self.model, self.tokenizer, call) as tokenizer:
                self._engine = (key, asked.attach(self.model, tokenizer, self.seed, None, self._context()))
        engine = self._engine[1]
        if options.may_change:  # an engine in a process of its own need not start again
            engine.options = options
        return engine

    def _context(self) -> BuildContext:
        """This process among those that sample."""
        device, company = str(self.device), self._company
        if company is None:
            return BuildContext(device=device)
        return BuildContext(device=str(company.device), rank=company.rank, world_size=company.world_size)

    def sync(self) -> Synced:
        """Give the engine the present weights, as `generate` does by itself; nothing to do where they are the same."""
        return SAME_TENSORS if self._engine is None else self._engine[1].sync()

    def close(self) -> None:
        """End the engine, if it lives outside of this process; the next call starts it again."""
        engine, self._engine = self._engine, None
        if engine is not None and hasattr(engine[1], "close"):
            engine[1].close()

    def _refuse_scattered(self) -> None:
        """Engines and checkpoints move weights as whole blocks of memory."""
        scattered = {name: p for name, p in self.model.named_parameters() if not p.is_contiguous()}
        if not scattered:
            return
        names = ", ".join(list(scattered)[:3]) + (f" and {len(scattered) - 3} more" if len(scattered) > 3 else "")
        if not self.hybrid_config.contiguous:
            raise ConfigError(
                f"model has parameters that are not contiguous in memory: {names}. Set "
                "hybrid_config={'contiguous': True} to have them laid out anew."
            )
        for parameter in scattered.values():
            parameter.data = parameter.data.contiguous()
        _log.info("made contiguous: %s", names)


def _number(call: Call, seed: int | None, generator: torch.Generator | None) -> int:
    """What tells the noise of this call from that of others; greedy calls leave generators alone."""
    if seed is not None or call.greedy:
        return seed or 0
    return int(torch.randint(2**62, (), generator=generator, device=None if generator is None else generator.device))
