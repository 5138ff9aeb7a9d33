"""Several adapters on one base model in memory: each is trained by an engine of its own, or frozen and sampled from.

base model ── peft ──┬── adapter A   TrainingEngine, AdamW over the parameters of A alone
                     ├── adapter B   TrainingEngine, ...
                     └── snapshots   frozen copies, from which responses are sampled
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from verl.checkpoint.core.hashing import digest_of
from verl.component import BuildContext, Description, component
from verl.engines.engine import Packs, TrainingEngine
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.errors import ConfigError
from verl.models.heads import LMHead
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


@component
class AdapterShape(Description):
    """A low-rank adapter: W + alpha / rank * B A on the chosen linear layers (Hu et al. 2021, arXiv:2106.09685, eq. 3).

    Args:
        rank: of the update of each layer.
        alpha: scale of the update.
        attention, mlp, unembedding: which layers have one.
        seed: of A; B begins at zero.
    """

    rank: Annotated[int, Field(ge=1, le=1024)] = 32
    alpha: float = 32.0
    attention: bool = True
    mlp: bool = True
    unembedding: bool = True
    seed: int = 0

    def layers(self, parts: Mapping[str, str]) -> list[str]:
        """`target_modules` of peft: last names of layers, or whole names where a last name is of several parts.

        Args:
            parts: of `linear_layers`.
        """
        names = {name for name, part in parts.items() if getattr(self, part)}
        if not names:
            raise ConfigError(
                f"attention, mlp, unembedding choose no layer: the model has {sorted({*parts.values()})}."
            )
        last = {name.rpartition(".")[2] for name in names}
        others = {name.rpartition(".")[2] for name in parts.keys() - names}
        return sorted(names if last & others else last)


def linear_layers(model: Any) -> dict[str, str]:
    """The part of each linear layer of a model: attention, mlp or unembedding; others are left out."""
    head, found = model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            parts = (part for part, words in PARTS.items() if any(word in name.lower() for word in words))
            found[name] = "unembedding" if module is head else next(parts, "")
    return {name: part for name, part in found.items() if part}


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

        self.lock = threading.RLock()
        self._new_engine = functools.partial(
            TrainingEngine, parallel=Parallelism(), micro_batch_tokens=micro_batch_tokens, autocast=autocast,
            packing=packing,
        )  # fmt: skip
        self.tokenizer = source.load_tokenizer()
        model: Any = source.load_causal_lm(device)
        self._layers = linear_layers(model)
        plain = min(name for name, part in self._layers.items() if part != "unembedding")
        self.model: Any = get_peft_model(model, LoraConfig(r=1, target_modules=[plain]), adapter_name=NO_ADAPTER)
        self.model.requires_grad_(False)
        rows = model.get_input_embeddings().weight[:DIGEST_ROWS].detach().to("cpu", torch.bfloat16)
        self.digest = digest_of(rows.contiguous().view(torch.int16).numpy().tobytes())
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self._engines: dict[str, TrainingEngine] = {}
        self._head: LMHead | None = None
        chosen = (rollout or HFRollout()).chosen_for(self.model, autocast)
        self._has_copy = chosen.location != "trainer"  # the engine has weights of its own
        if getattr(chosen, "sleep", None) == "auto":
            chosen = dataclasses.replace(chosen, sleep=False)  # type: ignore[call-arg]
        if self._has_copy:
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

    def add(self, name: str, shape: AdapterShape) -> TrainingEngine:
        """Make an adapter that is trained."""
        self._make(name, shape)
        self.model.set_adapter(name)
        optimizer = AdamW(lr=0.0, betas=(0.9, 0.95), eps=1e-12, max_grad_norm=None)
        engine = self._new_engine(self.model, optimizer=optimizer)
        engine.parameters = self._parameters(name)  # not those of other adapters; by names that do not have its own
        self._engines[name] = engine
        return engine

    def add_frozen(self, name: str, shape: AdapterShape, weights: Mapping[str, Tensor]) -> None:
        """Make an adapter of given weights, from which responses are sampled."""
        self._make(name, shape)
        try:
            self.set_weights(name, weights)
        except BaseException:
            self.remove(name)
            raise
        for parameter in self._parameters(name).values():
            parameter.requires_grad_(False)

    def _make(self, name: str, shape: AdapterShape) -> None:
        from peft import LoraConfig

        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # nothing is merged
            torch.manual_seed(derive_seed(shape.seed, "adapter"))
            config = LoraConfig(
                r=shape.rank,
                lora_alpha=shape.alpha,  # pyright: ignore[reportArgumentType] - a factor in use
                target_modules=shape.layers(self._layers),
                task_type="CAUSAL_LM",
            )
            self.model.add_adapter(name, config)

    def remove(self, name: str) -> None:
        """Free an adapter."""
        self._engines.pop(name, None)
        self.model.set_adapter(NO_ADAPTER)
        self.model.delete_adapter(name)

    def engine_of(self, name: str) -> TrainingEngine:
        """The training engine of an adapter, which is made the active one. Its weights may change from here on."""
        self._sampler.offload()
        self._in_sampler = NOTHING
        self.model.set_adapter(name)
        return self._engines[name]

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
        """Replace the weights of an adapter, in place.

        Raises:
            ConfigError: names or shapes are those of another adapter.
        """
        held = self._parameters(name)
        if held.keys() != weights.keys() or any(held[n].shape != x.shape for n, x in weights.items()):
            raise ConfigError("the weights are those of an adapter of another shape, or on another model.")
        for n, x in weights.items():
            held[n].copy_(x)
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
                self.model.set_adapter(name)
            if self._has_copy and name != self._in_sampler:
                self._in_sampler = NOTHING
                self._sampler.sync()
                self._in_sampler = name
            yield self._sampler

    @property
    def mixes(self) -> bool:
        """Whether a batch of samples may be of several adapters."""
        return not self._has_copy

    def close(self) -> None:
        """End the process of a sampling engine."""
        self._sampler.close()
