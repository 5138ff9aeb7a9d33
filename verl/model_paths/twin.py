"""The twin of a model: a small one of the same class, code and kinds of layers, on which ways of running it are tried.

A probe of the model itself with a few tokens reaches no window, chunk or change of rotary scaling, and one with many
tokens costs too much. The twin has one layer of each kind, a small width and random float32 weights under which
attention is peaked. Lengths at which something changes (windows, chunks, scalings) lie so that rows of `ROW_TOKENS`
tokens cross those that the rows of the run cross, and stop short of the others.

`SmallConfig` makes a configuration small by the names that transformers uses; a name that is not known stays as it is.
Whether the small model has what the large one has is looked at afterwards, on the model.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from verl.models.call import call_model, layers_around, unwrapped
from verl.models.pretrained import quiet_transformers, without_dropout

log = logging.getLogger(__name__)

ROW_TOKENS = 512
BEYOND = ROW_TOKENS + 64  # a length that no row of the trial reaches, but a packed line of several does
CONTEXT = 2 * ROW_TOKENS  # tokens of the longest batch of the trial, padding included, fit in
WIDTH, HEADS, HEAD_SIZE, ROTARY_SIZE, VOCABULARY = 64, 4, 16, 8, 128
FIRST_ORDINARY_TOKEN = 16  # special tokens get the ids below it
PLACES = (24, 40, 56, 88, 120, 152, 200, 264, 328)  # where changes lie in a row of the trial, in their order

LENGTH = re.compile(
    r"(window|chunk_size|chunk_length|block_size|floor_scale|max_position|max_target_positions|n_positions|n_ctx|max_seq_len|context_length"
    r"|max_distance|mem_len|local_attention|index_topk|rel_extent|prompt_length|original_max|max_length|compress_rates)"
)
NO_LENGTH = re.compile(r"(feed_forward|lm_head|pattern|max_window_layers|patch|image|audio|topk_blocks)")
LIMIT = re.compile(
    r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_length|max_target_positions)$"
)
WIDTHS = re.compile(
    r"(hidden_size|intermediate|d_model|n_embd|d_inner|dff$|ffn_dim|n_inner|dim_ff|d_ssm|embedding_size|embed_dim"
    r"|embed_proj_dim|lru_width|hidden_dim|emb_dim|embedding_dim|feed_forward_size|multiple_size|dim_model_base)"
)
HEAD_COUNT = re.compile(r"(num_.*heads|^n_head|n_heads$|attention_heads|num_kv_heads|num_query_groups|index_n_heads)")
HEAD_SIZES = re.compile(r"(head_dim|kv_channels|headdim|d_head$|head_size|dim_head)")
ROTARY = re.compile(r"(rotary_dim|rope_head_dim)$")
EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
CHOSEN_EXPERTS = re.compile(r"^(num_experts_per_tok|num_experts_per_token|moe_k|moe_topk|top_k_experts)$")
GROUPS = re.compile(r"^(n_group|n_groups|num_expert_group|mamba_n_groups|mamba_ngroups|o_groups)$")
LAYERS_BEFORE = re.compile(r"(first_k_dense|num_dense_layers|max_window_layers|layer_start)")
LAYER_NUMBERS = ("moe_layers", "hybrid_layer_ids", "full_attn_idxs", "mlp_only_layers", "cross_attention_layers")
LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_layers_per_stack", "decoder_layers", "num_blocks"
)  # fmt: skip
PARTS = re.compile(r"(^|\.)(mamba_)?(chunk_size|block_size)$")  # in which a recurrence is computed; changes no result
MOST = {  # by name, the largest value of the small model
    "topk_group": 1,
    "mamba_d_state": 16,
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "zero_expert_num": 2,
    "encoder_hash_byte_group_vocab": 64,
    "index_n_heads": 32,  # enough that no score of an indexer is zero, and none is tied with another
}


def lengths_in(config: Any) -> dict[str, int]:
    """Dotted name -> the lengths in a configuration with which something may compare the length of a row, in tokens."""
    return {
        path: int(value)
        for path, value in _numbers(config)
        if LENGTH.search(path) and not NO_LENGTH.search(path) and value > 1
    }


def crossed_lengths(config: Any, row_tokens: int) -> tuple[int, ...]:
    """The lengths of a configuration that rows of so many tokens exceed, without mere limits of the context."""
    found, is_dynamic = lengths_in(config), has_dynamic_rope(config)
    names = {path: path.rpartition(".")[2] for path in found}
    return tuple(
        sorted({n for path, n in found.items() if n < row_tokens and not _is_mere_limit(names[path], is_dynamic)})
    )


def has_dynamic_rope(config: Any) -> bool:
    """Whether rotary frequencies change with the length of a row, beyond the context that the configuration names."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = (rope, *(kind for kind in rope.values() if isinstance(kind, dict)))
    return any("dynamic" in str(kind.get("rope_type", "")) for kind in kinds)


def _is_mere_limit(name: str, is_dynamic: bool) -> bool:
    return bool(LIMIT.search(name)) and not (is_dynamic and name == "max_position_embeddings")


def layer_counts(config: Any) -> list[int]:
    """Numbers in a configuration that may be that of the layers."""
    config = config.get_text_config()
    values = (getattr(config, name, None) for name in LAYER_COUNTS)
    return [value for value in values if isinstance(value, int)]


class SmallConfig:
    """Makes configurations small in place.

    Args:
        config: of the whole model.
        row_tokens: of the longest row of the run.
        layers: which layers to keep, and how many there are; None for all.
        is_narrow: make layers narrow too.
        moved: the place of a change in a row of the trial, and by how many tokens to move it; to plant a fault.
    Attributes:
        lengths: where, in a row of the trial, something changes, in tokens.
        parts: those of them at which only the way of computing changes.
    """

    def __init__(
        self,
        config: Any,
        row_tokens: int,
        layers: tuple[Sequence[int], int] | None,
        *,
        is_narrow: bool = True,
        moved: tuple[int, int] | None = None,
    ):
        self.layers, self.total = layers or (None, None)
        self.is_narrow = is_narrow
        self._is_dynamic = has_dynamic_rope(config)
        places: dict[int, int] = {}
        for value in crossed_lengths(config, row_tokens):
            least = max(places.values(), default=-8) + 8
            places[value] = max(least, value if value <= 64 else PLACES[min(len(places), len(PLACES) - 1)])
        self.lengths = tuple(sorted(places.values()))
        known = lengths_in(config).items()
        of_parts = {n for path, n in known if PARTS.search(path)} - {n for path, n in known if not PARTS.search(path)}
        self.parts = tuple(places[n] for n in sorted(of_parts) if n in places)
        at, by = moved or (0, 0)
        self._places = {value: place + (by if place == at else 0) for value, place in places.items()}
        self._ids: dict[int, int] = {}
        self._shrink(config)

    def _shrink(self, config: Any) -> None:
        values = vars(config)
        hidden = _first(values, ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "hidden_dim"))
        heads = _first(values, ("num_attention_heads", "n_head", "n_heads"))
        self._scale = min(1.0, WIDTH / hidden) if hidden and self.is_narrow else 1.0
        self._rotary = values.get("qk_rope_head_dim") or values.get("head_dim")
        self._rotary = self._rotary or (hidden // heads if hidden and heads else None)
        self._is_latent = "qk_rope_head_dim" in values  # its head_dim is that of the rotary part
        for name, value in list(values.items()):
            if name in ("id2label", "label2id") or (name.startswith("_") and name != "_per_layer_overrides"):
                continue
            if hasattr(value, "to_diff_dict"):
                before = self._scale, self._rotary, self._is_latent
                self._shrink(value)
                self._scale, self._rotary, self._is_latent = before
            elif (small := self._smaller(name, value, name)) is not value:
                _set(config, name, small)
        if self.is_narrow:
            self._fit_heads(config)
        for name in LAYER_COUNTS:
            if self.layers is not None and isinstance(values.get(name), int) and values[name] % self.total == 0:
                _set(config, name, values[name] // self.total * len(self.layers))

    def _fit_heads(self, config: Any) -> None:
        """Sizes that are products of others."""
        values = vars(config)
        expand = _first(values, ("mamba_expand", "expand"))
        heads = _first(values, ("mamba_n_heads", "mamba_num_heads", "num_heads"))
        size = next((n for n in ("mamba_d_head", "mamba_head_dim", "head_dim") if isinstance(values.get(n), int)), None)
        if expand and heads and size and (size != "head_dim" or "num_attention_heads" not in values):
            inner = values.get("mamba_d_ssm") or expand * values["hidden_size"]
            _set(config, size, inner // heads)
        if "qk_head_dim" in values and isinstance(values.get("qk_nope_head_dim"), int):
            _set(config, "qk_head_dim", values["qk_nope_head_dim"] + values["qk_rope_head_dim"])

    def _smaller(self, name: str, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            if value and all(str(key).isdigit() for key in value):
                return self._by_layer(value, path)
            return {key: self._smaller(str(key), item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return self._smaller_list(name, list(value), path) if value else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if LENGTH.search(path) and not NO_LENGTH.search(path):
            return type(value)(self._length(name, int(value))) if value > 1 else value
        return self._size(name, value) if isinstance(value, int) else value

    def _length(self, name: str, value: int) -> int:
        if _is_mere_limit(name, self._is_dynamic):
            return CONTEXT
        return self._places.get(value, BEYOND)

    def _size(self, name: str, value: int) -> int:
        if re.search(r"token_ids?$|token_index$", name):
            return value if value < 0 or not self.is_narrow else self._small_id(value)
        if self.layers is not None and self.total and LAYERS_BEFORE.search(name):
            return sum(layer < value for layer in self.layers)
        if self.layers is not None and self.total and name == "num_kv_shared_layers":
            return sum(layer >= self.total - value for layer in self.layers)
        if not self.is_narrow:
            return value
        if name in MOST:
            return min(value, MOST[name])
        if "vocab_size" in name:
            return min(value, VOCABULARY)
        if EXPERTS.search(name):
            return min(value, 8)
        if CHOSEN_EXPERTS.search(name) or GROUPS.search(name):
            return min(value, 2)
        if ROTARY.search(name) or (name == "head_dim" and self._is_latent):
            return min(value, ROTARY_SIZE)
        if HEAD_SIZES.search(name):
            return min(value, HEAD_SIZE)
        if HEAD_COUNT.search(name):
            return min(value, HEADS)
        if re.search(r"_rank$|lowrank", name):
            return min(value, 16)
        return (
            max(8, round(value * self._scale / 8) * 8) if value and WIDTHS.search(name) and self._scale < 1 else value
        )

    def _small_id(self, token: int) -> int:
        return self._ids.setdefault(token, len(self._ids) % FIRST_ORDINARY_TOKEN)

    def _smaller_list(self, name: str, value: list[Any], path: str) -> Any:
        if self.layers is not None and name in LAYER_NUMBERS:
            return [place for place, layer in enumerate(self.layers) if layer in value]
        if self.layers is not None and len(value) == self.total:
            value = [value[layer] for layer in self.layers]
        if self.is_narrow and self._rotary and re.match(r"(.*\.)?rope", path) and isinstance(value[0], int | float):
            size = ROTARY_SIZE if self._is_latent else HEAD_SIZE
            share = min(size, self._rotary) / self._rotary
            if "section" in name:
                sections = [max(1, int(item * share)) for item in value]
                return [sections[0] + max(0, round(sum(value) * share) - sum(sections)), *sections[1:]]
            wanted = max(1, round(len(value) * share))  # factors of frequencies
            return [value[i * len(value) // wanted] for i in range(wanted)]
        return [self._smaller(name, item, path) for item in value]

    def _by_layer(self, value: dict[Any, Any], path: str) -> dict[Any, Any]:
        """Settings of single layers, by the number of the layer."""
        kept = {}
        for key, item in value.items():
            if self.layers is None or int(key) in self.layers:
                place = int(key) if self.layers is None else self.layers.index(int(key))
                new = f"{place:0{len(key)}d}" if isinstance(key, str) else place
                kept[new] = self._smaller(str(key), item, path)
        return kept


def _numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    items = config.items() if isinstance(config, dict) else vars(config).items()
    for name, value in items:
        if str(name).startswith("_") or name in ("id2label", "label2id"):
            continue
        if isinstance(value, dict) or hasattr(value, "to_diff_dict"):
            yield from _numbers(value, f"{prefix}{name}.")
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool) and number == number:
                yield f"{prefix}{name}", min(number, 2**62)


def _first(values: dict[str, Any], names: Sequence[str]) -> int | None:
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # noqa: BLE001 - a check of one number before its partners have changed
        object.__setattr__(config, name, value)


MAX_PARAMETERS = 20_000_000
SMALL = 3_000_000  # parameters, up to which the twin keeps the widths of the model
QUERY_OR_KEY = re.compile(r"(q_|k_|query|key|qkv|c_attn|Wqkv|in_proj_qkvz|kv_a|kv_b)")
STATE = re.compile(r"(conv|A_log|_log|dt_|time_)")  # parameters whose own initial values mean something


class NoTwin(Exception):
    """A model has no twin; the text says why."""


@dataclass(frozen=True)
class Twin:
    """A small model of the same class as another, for checks.

    Attributes:
        model: in evaluation mode, float32, on the CPU.
        lengths: of at most `ROW_TOKENS` tokens, at which something changes in it.
        parts: those of them at which only the way of computing changes.
        token_ids: the first ordinary token id, and the first one beyond the vocabulary.
        sharpness: of its weights.
    """

    model: Any
    lengths: tuple[int, ...]
    parts: tuple[int, ...]
    token_ids: tuple[int, int]
    sharpness: float


def make_twin(model: Any, row_tokens: int, moved: tuple[int, int] | None = None, sharpness: float = 1.0) -> Twin:
    """The twin of a Hugging Face model for rows up to a length.

    Args:
        moved: one of its `lengths`, and by how many tokens to move it; to plant a fault.
        sharpness: of its weights, 1 where attention is peaked.
    Raises:
        NoTwin: none can be made.
    """
    kind = model_class(model)
    whole = _on_meta(kind, model.config)  # the model itself may carry an adapter, or be divided
    kinds, reasons = layer_kinds(whole), []
    is_small = sum(p.numel() for p in whole.parameters()) <= SMALL
    for is_narrow in (False, True) if is_small else (True, False):
        for layers in _layer_choices(kinds):
            config = copy.deepcopy(model.config)
            if "flash" in str(config._attn_implementation):  # runs on GPUs alone; the first real batch tries it
                config._attn_implementation = "sdpa"
            try:
                kept = None if layers is None else (layers, len(kinds or ()))
                small = SmallConfig(config, row_tokens, kept, is_narrow=is_narrow, moved=moved)
                first = FIRST_ORDINARY_TOKEN if is_narrow else 1
                tokens = (first, config.get_text_config().vocab_size)
                twin = Twin(_built(kind, config, sharpness), small.lengths, small.parts, tokens, sharpness)
                _try_out(twin)
            except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
                reasons.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
                continue
            if kinds is None or set(layer_kinds(twin.model) or ()) == set(kinds):
                return twin
            reasons.append("its kinds of layers differ")
    raise NoTwin(reasons[0])


class _RefusedOperations(TorchDispatchMode):
    """Notes operations that raise on a GPU, in themselves or in their backward pass, where deterministic algorithms are
    demanded. Source: documentation of torch.use_deterministic_algorithms."""

    always = re.compile(
        r"(_?adaptive_\w+_pool\dd|avg_pool3d|fractional_max_pool\dd|max_unpool\dd|reflection_pad\dd"
        r"|upsample_(linear|bilinear|bicubic|trilinear)\w*|grid_sampler\w*|_?ctc_loss|kthvalue|put_?)$"
    )

    def __init__(self):
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        is_refused = {
            "cumsum": lambda: (kwargs.get("dtype") or args[0].dtype).is_floating_point,
            "bincount": lambda: len(args) > 1 or kwargs.get("weights") is not None,
            "median": lambda: len(args) > 1,
            "scatter_reduce": lambda: "prod" in args,
        }.get(name, lambda: self.always.match(name))
        if is_refused():
            self.found.add(name)
        return func(*args, **kwargs)


def operations_without_deterministic_form(model: Any) -> set[str]:
    """Names of the operations of a model that raise on a GPU where deterministic algorithms are demanded, found on its
    twin.

    Raises:
        NoTwin: none can be made.
    """
    twin = make_twin(model, ROW_TOKENS)
    with torch.no_grad(), _RefusedOperations() as seen:
        _try_out(twin)
    return seen.found


def exempt_from_determinism(model: Any) -> None:
    """Let operations of a model that have no deterministic form on a GPU warn in place of raising, in this process.

    No effect where deterministic algorithms are not demanded, or where all operations have such a form.
    """
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        return
    try:
        refused = ", ".join(sorted(operations_without_deterministic_form(model)))
    except Exception as error:  # noqa: BLE001 - whatever a model's own code has against a twin
        refused = f"some, perhaps, since no small copy of it could be tried ({type(error).__name__}: {error})"
    if refused:
        torch.use_deterministic_algorithms(True, warn_only=True)
        log.warning(
            "model is a %s: operations without a deterministic form on a GPU: %s. Two equal runs may differ.",
            type(model).__name__, refused,
        )  # fmt: skip


def model_class(model: Any) -> type:
    """The class that a model was made of; torch's FSDP2 puts one of its own before it."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(model)
    return kind.__mro__[2] if issubclass(kind, FSDPModule) else kind


def has_own_code(model: Any) -> str | None:
    """Parts of a model object that differ from its class and configuration, so that no small copy has the same code.

    Accelerate's forward, which moves weights, is no other; nor are adapters around a layer, or what transformers itself
    has put in to load quantized weights.
    """
    if any("forward" in vars(layer) and not hasattr(layer, "_hf_hook") for layer in layers_around(model)):
        return "its forward was replaced on the object"
    model = unwrapped(model)
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    try:
        made = {name: type(module) for name, module in _on_meta(model_class(model), model.config).named_modules()}
    except Exception:  # noqa: BLE001 - whatever a class of its own needs to be made
        return "its class cannot be made from its configuration"
    for name, module in model.named_modules():
        kind = model_class(module)
        if name in made and kind is not made[name] and not hasattr(module, "base_layer"):
            return f"its part {name} is a {kind.__name__}, where its class has a {made[name].__name__}"
    return None


def _on_meta(kind: type, config: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]), quiet_transformers(), torch.device("meta"):
        return kind(copy.deepcopy(config))


@torch.no_grad()
def _try_out(twin: Twin) -> None:
    first, end = twin.token_ids
    found = call_model(twin.model, input_ids=first + torch.arange(32)[None] % (end - first), use_cache=False)
    if not torch.isfinite(found[0] if isinstance(found[0], Tensor) else found.logits).all():
        raise NoTwin("its numbers are not finite")


def _built(kind: type, config: Any, sharpness: float) -> Any:
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        size = sum(p.numel() for p in _on_meta(kind, config).parameters())
        if size > MAX_PARAMETERS:
            raise NoTwin(f"it would have {size / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            twin = without_dropout(kind(config).float()).eval()
        finally:
            torch.set_default_dtype(before)
        sharpen(twin, sharpness)
    return twin.requires_grad_(False)


@torch.no_grad()
def sharpen(model: Any, sharpness: float) -> None:
    """Random weights of the size at which tokens and positions matter."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head = None if output is None else getattr(output, "weight", None)
    for name, parameter in model.named_parameters():
        if STATE.search(name) or not parameter.is_floating_point():
            continue
        if parameter is head:
            parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
        elif parameter.ndim >= 2:
            fan_in = 1 if "embed" in name or "wte" in name or "wpe" in name else parameter.shape[-1]
            gain = sharpness * (2.0 if QUERY_OR_KEY.search(name) else 1.0)
            parameter.normal_(0.0, gain * fan_in**-0.5)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1)


def layer_kinds(model: nn.Module) -> list[tuple] | None:
    """Kind of each layer, by its modules and options; None if layers are not found."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for count in layer_counts(model.config):
        if count and (found := [layers for layers in lists if len(layers) == count]):
            return [_kind(layer) for layer in found[0]]
    return None


def _kind(layer: nn.Module) -> tuple:
    parts = []
    for name, module in layer.named_modules():
        if re.search(r"\.\d+(\.|$)", name):  # one of many experts
            continue
        settings = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        switches = [
            (key, value if isinstance(value, bool | str) else value is None)
            for key, value in sorted(settings.items())
            if key not in ("training", "config") and (isinstance(value, bool | str) or value is None or "window" in key)
        ]
        parts.append((name, type(module).__name__, tuple(switches)))
    return tuple(parts)


def _layer_choices(kinds: list[tuple] | None) -> Iterator[list[int] | None]:
    """Which layers the twin has: one of each kind if that can be, else the first few, else all."""
    if kinds is None:
        yield None
        return
    firsts = sorted(kinds.index(kind) for kind in set(kinds))
    lasts = sorted(len(kinds) - 1 - kinds[::-1].index(kind) for kind in set(kinds))
    tried = [firsts, sorted({*firsts, *lasts}), *(list(range(n)) for n in (2, 4, 6, 8, 12, 16, len(kinds)))]
    for index, layers in enumerate(tried):
        if len(layers) <= len(kinds) and layers not in tried[:index]:
            yield layers
