"""A model configuration made small: fewer layers, narrower ones, and the lengths at which something changes scaled.

The names are those of transformers' configurations; a name that is not known here stays as it is. Whether the small
model has what the large one has is looked at afterwards, on the model (`verl.model_paths.twin`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

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
