"""Several adapters on one base model in memory: each is trained by an engine of its own, or frozen and sampled from.

base model ── peft ──┬── adapter A   TrainingEngine, AdamW over the parameters of A alone
                     ├── adapter B   TrainingEngine, ...
                     └── snapshots   copies, from which responses are sampled
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verl.checkpoint.core.hashing import digest_of
from verl.component import BuildContext
from verl.engines.engine import Packs, TrainingEngine
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.errors import ConfigError
from verl.models.heads import LMHead
from verl.models.images import vision_tower
from verl.models.lora import LoRA, second_adapter_fault
from verl.models.model_files import quiet_transformers
from verl.models.parallel_info import Autocast
from verl.models.pretrained import ModelSource
from verl.models.structure import unwrapped
from verl.rollout.base import ALONE, Rollout, RolloutEngine
from verl.rollout.hf import HFRollout
from verl.utils.seeding import derive_seed

DIGEST_ROWS = 512  # of the embedding
NO_ADAPTER = "none"  # peft needs one; it is never active
NOTHING = ""  # name of no adapter
BASE = "__base__"  # peft's name of rows without an adapter
PARTS = {  # words in the names of layers
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "feed_forward", "ffn", "experts", "moe"),
}


def linear_layers(model: Any) -> dict[str, str]:
    """The part of each linear layer of a model: attention, mlp or unembedding; empty for others and those of a vision
    tower."""
    head, tower, found = model.get_output_embeddings(), vision_tower(model), dict[str, str]()
    of_tower = {*tower.modules()} if tower is not None else set[nn.Module]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            parts = (part for part, words in PARTS.items() if any(word in name.lower() for word in words))
            found[name] = "unembedding" if module is head else "" if module in of_tower else next(parts, "")
    return found


class BaseModel:
    """A model in memory, with adapters by name.

    Args:
        source: the model with its tokenizer.
        device, autocast: of computation.
        micro_batch_tokens, packing: see `TrainingEngine`.
        rollout: engine that samples; None for the tensors that train.
        context: of this process.
    Attributes:
        tokenizer: of the model.
        lock: held by whoever computes with the model.
        vocabulary: number of token ids.
        digest: of some weights, by which saved adapters know their base model.
        longest: tokens of a row that the model reads; None if unknown.
        mixes: whether a batch of samples may be of several adapters.
    """

    def __init__(
        self,
        source: ModelSource,
        device: str,
        autocast: Autocast = None,
        micro_batch_tokens: int = 16384,
        packing: Packs = "auto",
        rollout: Rollout | None = None,
        context: BuildContext = ALONE,
    ):
        from peft import LoraConfig, get_peft_model

        if (fault := second_adapter_fault(getattr(source, "path", ""))) is not None:
            raise ConfigError(f"model {fault}")
        self.lock = threading.RLock()
        self._new_engine = functools.partial(
            TrainingEngine, parallel=Parallelism(), micro_batch_tokens=micro_batch_tokens, autocast=autocast,
            packing=packing,
        )  # fmt: skip
        self.tokenizer = source.load_tokenizer()
        model: Any = source.load_causal_lm(device)
        self._layers = linear_layers(model)
        plain = min(name for name, part in self._layers.items() if part in PARTS)
        with quiet_transformers():  # peft reads what transformers will rename
            self.model: Any = get_peft_model(model, LoraConfig(r=1, target_modules=[plain]), adapter_name=NO_ADAPTER)
        self.model.requires_grad_(False)
        rows = model.get_input_embeddings().weight[:DIGEST_ROWS].detach().to("cpu", torch.bfloat16)
        self.digest = digest_of(rows.contiguous().view(torch.int16).numpy().tobytes())
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self._head: LMHead | None = None
        chosen = (rollout or HFRollout()).chosen_for(self.model, autocast)
        self.mixes = chosen.location == "trainer"  # else the engine has weights of its own
        if getattr(chosen, "sleep", None) == "auto":
            chosen = dataclasses.replace(chosen, sleep=False)  # type: ignore[call-arg]
        if not self.mixes:
            self._untie()
        context = dataclasses.replace(context, device=device)
        self._sampler = chosen.attach(self.model, self.tokenizer, 0, autocast, context)
        self._in_sampler: str | None = NOTHING  # the adapter whose current weights the engine has
        limits = [x for x in (source.max_positions(), self._sampler.row_tokens) if x is not None]
        self.longest = min(limits, default=None)
        self.scorer = self._new_engine(self.model)

    def _untie(self) -> None:
        """Give the head weights of its own: in an engine's copy an adapter of the head is merged into them. They are
        not trained, so the model stays the same."""
        head, config = self.core.get_output_embeddings(), self.core.config
        if head.weight is self.core.get_input_embeddings().weight:
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False

    @property
    def core(self) -> Any:
        """The Hugging Face model, without peft's wrapper."""
        return unwrapped(self.model)

    # Adapters

    def layers(self, attention: bool = True, mlp: bool = True, unembedding: bool = True) -> tuple[str, ...]:
        """Names of the linear layers of these parts, for an adapter: last names, or whole names where a last name is of
        several parts."""
        chosen = {"attention": attention, "mlp": mlp, "unembedding": unembedding}
        names = {name for name, part in self._layers.items() if chosen.get(part)}
        if not names:
            parts = sorted({*self._layers.values()} - {""})
            raise ConfigError(f"attention, mlp, unembedding choose no linear layer: the model has {', '.join(parts)}.")
        last = {name.rpartition(".")[2] for name in names}
        others = {name.rpartition(".")[2] for name in self._layers.keys() - names}
        return tuple(sorted(names if last & others else last))

    def add(self, name: str, lora: LoRA, seed: int) -> TrainingEngine:
        """Make an adapter that is trained.

        Args:
            seed: of A; B begins at zero.
        """
        self.make(name, lora, seed)
        self.model.set_adapter(name)
        optimizer = AdamW(lr=0.0, betas=(0.9, 0.95), eps=1e-12, max_grad_norm=None)
        engine = self._new_engine(self.model, optimizer=optimizer)
        engine.parameters = self._parameters(name)  # not those of other adapters; by names that do not have its own
        return engine

    def make(self, name: str, lora: LoRA, seed: int = 0) -> None:
        """Make an adapter that is not trained."""
        from peft import LoraConfig

        with torch.random.fork_rng(devices=[]), quiet_transformers(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # nothing is merged
            torch.manual_seed(derive_seed(seed, "adapter"))
            values: Any = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.target_modules)}
            self.model.add_adapter(name, LoraConfig(**values, task_type="CAUSAL_LM"))

    def remove(self, name: str) -> None:
        """Free an adapter, if it is there."""
        if name in self.model.peft_config:
            self.model.set_adapter(NO_ADAPTER)
            self.model.delete_adapter(name)

    def _select(self, name: str) -> None:
        if name not in self.model.peft_config:
            raise ConfigError("this session is closed. Make another one.")
        self.model.set_adapter(name)

    def activate(self, name: str) -> None:
        """Make an adapter that of the forward passes in training. Its weights may change from here on."""
        self._sampler.offload()
        self._in_sampler = NOTHING
        self._select(name)

    @property
    def head(self) -> LMHead:
        if self._head is None or self._head.head is not self.model.get_output_embeddings():  # an adapter replaced it
            self._head = LMHead(self.model)
        return self._head

    def _parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Parameters of an adapter, by their names without that of the adapter."""
        mark = f".{name}."
        found = {n: p for n, p in self.model.named_parameters() if mark in n and "lora_" in n}
        return {n.replace(mark, "."): p for n, p in found.items()}

    def weights(self, name: str) -> dict[str, Tensor]:
        """Copies of the weights of an adapter in main memory, by their names in peft's file."""
        return {n: p.detach().cpu().clone() for n, p in self._parameters(name).items()}

    @torch.no_grad()
    def set_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights of an adapter, in place."""
        for n, parameter in self._parameters(name).items():
            parameter.copy_(weights[n])
        self._in_sampler = NOTHING

    # Sampling

    @contextlib.contextmanager
    def sampling_from(self, *names: str | None) -> Iterator[RolloutEngine]:
        """The sampling engine with an adapter active; None for the base model. With several names the weights of each
        turn are to be named. An engine with weights of its own gets base and adapter as one model, verified, unless it
        has them."""
        name = names[0] if len(names) == 1 else None
        with self.model.disable_adapter() if names == (None,) else contextlib.nullcontext():
            if name is not None:
                self._select(name)
            if not self.mixes and name != self._in_sampler:
                self._in_sampler = NOTHING
                self._sampler.sync()
                self._in_sampler = name
            yield self._sampler

    def close(self) -> None:
        """End the process of a sampling engine."""
        self._sampler.close()
