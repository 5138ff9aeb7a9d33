"""Execution paths of a model: those that were tried for its family, or the plain ones.

    model ──> record of its family ──> paths, or a refusal
      └── none holds for it ──> short rows of the model itself ──> plain paths, or a refusal

Two later checks use the weights and rows of the run: the first batch of each role (`verl.workers.first_batch_check`)
and the log-probs of sampled tokens (`verl.rollout.hf`) are compared with a plain forward pass of each row, for some
rows of a batch (`chosen_rows`), by the distance of the results (`row_gaps`).
"""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.model_paths import packed_attention
from verl.model_paths.decode import BatchReader
from verl.model_paths.families import (
    NOT_A_POLICY,
    PLAIN,
    UNTRIED,
    CacheKind,
    FamilyRecord,
    ModelPaths,
    family_table,
    record_for,
    row_limit,
)
from verl.models.model_stats import settings_text
from verl.models.parallel_info import compute_device
from verl.models.pretrained import CONTEXT_KEYS, quiet_transformers
from verl.models.structure import call_model, has_lm_head, layers_around, unwrapped
from verl.ops.sampling import plain_kernels
from verl.protocol import DataProto
from verl.utils.env_check import installed

PROBE_TOKENS = 24, 37, 512  # lengths of the rows that probe a model without a record
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}  # relative to the standard deviation of its logits
TOLERANCE = 0.02  # for narrower dtypes
GROUP = 3  # maximum rows with a shared prompt in a comparison
# Mean difference over the tokens of a row, in nats or in units of values: rounding stays below; a wrong window,
# position or neighbouring text is far above
BOUNDS = {torch.float64: 1e-4, torch.float32: 5e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
TAIL = 7  # tokens appended to a row to measure rounding, since the plain forward pass then runs in other shapes
NOISE_FACTOR = 2.0  # up to this factor it is rounding: paths differ in more operations than two plain forward passes
WINDOW = 32  # consecutive tokens; a fault late in a row is not visible in the mean over the whole row
ENCODER_DECODER = "it is an encoder-decoder, and a policy is one decoder. Give a causal language model of its kind."
BATCH_DEPENDENT = "a row has other numbers beside others of its length than alone."
NOT_REPEATABLE = "its numbers differ from one forward pass of a row to the next, so it has no log-probs to train on."
LEFT_OUT_BY_SDPA = "its attention is sdpa, which leaves a part of it out. Set attention=eager."

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PathFinding:
    """Execution paths of a model.

    Attributes:
        paths: execution paths to use.
        refusal: why no execution path can train it; None if one can.
        limit: configuration entry that limits the length of rows, and its value in tokens.
        nondeterministic: its operations without a deterministic form on a GPU; None if unknown.
    """

    paths: ModelPaths = PLAIN
    refusal: str | None = None
    limit: tuple[str, int] | None = None
    nondeterministic: tuple[str, ...] | None = None


def paths_for(model: Any, row_tokens: int, name: str = "model", *, shares_tokens: bool = False) -> ModelPaths:
    """The execution paths of a model for rows of up to `row_tokens` tokens.

    Installs our attention function in the model if the paths need it.

    Args:
        name: configuration path of the model, for messages.
        shares_tokens: whether the tokens of a row will be divided over processes. Only packed lines allow this: they
            show that tokens interact in attention alone, which communicates.
    Raises:
        ConfigError: the model cannot be trained, or not with these rows or shared tokens.
    """
    finding, kind = finding_for(model), type(unwrapped(model)).__name__
    refusal = finding.refusal or _too_long(finding.limit, row_tokens)
    if refusal is not None:
        raise ConfigError(f"{name} is a {kind}: {refusal}")
    paths = finding.paths
    if paths.own_attention and (fault := packed_attention.enable(unwrapped(model))) is not None:
        paths = replace(PLAIN, reasons=(fault,))
    if shares_tokens and paths.scoring != "packed":
        raise ConfigError(
            f"{name} is a {kind}: context parallelism (sharding.cp) needs a model whose tokens meet in attention "
            f"alone, as packed lines do, and it was not shown to be one: "
            f"{'; '.join(paths.reasons) or 'it runs as ' + paths.scoring + ' batches'}. Set sharding.cp=1."
        )
    return paths


def finding_for(model: Any) -> PathFinding:
    """The finding for a model, cached on the object until its configuration changes."""
    base = unwrapped(model)
    text = settings_text(base.config)
    if vars(base).get("_verl_paths", (None,))[0] != text:
        finding = _find(model)
        vars(base)["_verl_paths"] = text, finding
        _tell(base, finding)
    return vars(base)["_verl_paths"][1]


def forget(model: Any) -> None:
    """Discard the finding of a model whose modules were changed."""
    vars(unwrapped(model)).pop("_verl_paths", None)


def exempt_from_determinism(model: Any) -> None:
    """Make operations of a model without a deterministic form on a GPU warn instead of raise, in this process.

    No effect if deterministic algorithms are not enabled, or if all operations have such a form.
    """
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        return
    if (operations := finding_for(model).nondeterministic) == ():
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    _log.warning(
        "model is a %s: operations without a deterministic form on a GPU: %s. Two equal runs may differ.",
        type(model).__name__, ", ".join(operations or ("some, perhaps, since its family was not tried",)),
    )  # fmt: skip


def _find(model: Any) -> PathFinding:
    base = unwrapped(model)
    if base.config.is_encoder_decoder:
        return PathFinding(refusal=ENCODER_DECODER)
    modified = modified_part(model)
    record = record_of(model) if modified is None else modified
    if isinstance(record, str):
        return _probed(model, record, PLAIN if modified else UNTRIED)
    limit = row_limit(base.config, record)
    if record.refusal is not None:
        return PathFinding(refusal=record.refusal)
    return _recorded(base, record, limit)


def _recorded(base: Any, record: FamilyRecord, limit: tuple[str, int] | None) -> PathFinding:
    attention = base.config._attn_implementation
    paths = replace(family_table().paths[record.paths], trains=record.trains)
    if attention not in ("eager", "sdpa", packed_attention.NAME):
        paths = replace(PLAIN, trains=record.trains, reasons=(f"its attention is {attention}",))
    elif attention == "eager":
        paths = paths.by_eager()
    elif record.needs_eager:
        return PathFinding(refusal=LEFT_OUT_BY_SDPA)
    return PathFinding(paths, None, limit, record.nondeterministic)


def _probed(model: Any, reason: str, paths: ModelPaths) -> PathFinding:
    """A finding from probing the model with short rows."""
    limit = row_limit(unwrapped(model).config, None)
    if next(model.parameters()).device.type == "meta":  # its weights are loaded later, and checked with the first batch
        return PathFinding(replace(paths, cache="none", reasons=(reason,)), None, limit)
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        plain_kernels(torch.device("cuda")),  # what a GPU has no deterministic kernel for, is told, not refused
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        refusal = _fault_of_rows(model, limit)
        if paths.cache != "none" and (refusal is not None or not has_lm_head(model) or not _own_cache_is_right(model)):
            paths = replace(paths, cache="none")
        return PathFinding(replace(paths, reasons=(reason,)), refusal, limit)


def _fault_of_rows(model: Any, limit: tuple[str, int] | None) -> str | None:
    """Why a model cannot be trained, from probing it with random rows; None if no fault was found."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = min(n for n in (PROBE_TOKENS[-1], context, limit and limit[1]) if n)
    for tokens in sorted({min(n, longest) for n in PROBE_TOKENS}):
        ids = _random_row(model, tokens)
        half = max(1, tokens // 2)
        try:
            batches = ids[None], ids[None], ids[None, :half], torch.stack([ids, ids.flip(0)])
            whole, again, part, alongside = (_states(model, x)[0, :half].double() for x in batches)
        except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
            return f"it cannot read a row of {tokens} tokens ({type(error).__name__}: {error})."
        for other, refusal in ((again, NOT_REPEATABLE), (part, NOT_A_POLICY), (alongside, BATCH_DEPENDENT)):
            if _distance(whole, other) > _tolerance(model):
                return refusal
    return None


def _own_cache_is_right(model: Any) -> bool:
    """Whether decoding token by token gives the logits of a plain forward pass of the row."""
    prompt, row = min(PROBE_TOKENS), _random_row(model, sorted(PROBE_TOKENS)[1])
    reader = BatchReader(model, ModelPaths(cache="own"))
    try:
        steps = [reader.begin(row[None, :prompt], torch.ones_like(row[None, :prompt])).logits[0]]
        steps += [reader.read(token[None]).logits[0] for token in row[prompt:-1]]
    except Exception:  # noqa: BLE001 - whatever a model's own code has against it
        return False
    expected = _states(model, row[None])[0, prompt - 1 : -1].double()
    return _distance(expected, torch.stack(steps).double()) <= _tolerance(model)


def _random_row(model: Any, tokens: int) -> Tensor:
    size, draw = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    return torch.randint(min(8, size - 1), size, (tokens,), generator=draw).to(compute_device(model))


def _tolerance(model: Any) -> float:
    return TOLERANCES.get(next(model.parameters()).dtype, TOLERANCE)


def _distance(expected: Tensor, other: Tensor) -> float:
    """The mean difference, relative to the standard deviation of the expected values."""
    return float((expected - other).abs().mean() / expected.std().clamp(min=1e-12))


def record_of(model: Any) -> FamilyRecord | str:
    """The record of the family table for a Hugging Face model, or why there is none."""
    base = unwrapped(model)
    return record_for(base.config, model_class(base))


def modified_part(model: Any) -> str | None:
    """Description of how a model object differs from its class and configuration; None if it does not.

    Does not count accelerate's forward, which moves weights, adapters around a layer, or modules that transformers
    inserts to load quantized weights.
    """
    if any("forward" in vars(layer) and not hasattr(layer, "_hf_hook") for layer in layers_around(model)):
        return "its forward was replaced on the object"
    base = unwrapped(model)
    if getattr(base.config, "quantization_config", None) is not None:
        return None
    key = model_class(base), settings_text(base.config)
    try:
        if key not in _original_modules:
            with torch.random.fork_rng(devices=[]), quiet_transformers(), torch.device("meta"):  # without weights
                skeleton = model_class(base)(copy.deepcopy(base.config))
            _original_modules[key] = {name: type(module) for name, module in skeleton.named_modules()}
        original = _original_modules[key]
    except Exception:  # noqa: BLE001 - whatever a class of its own needs to be made
        return "its class cannot be made from its configuration"
    for name, module in base.named_modules():
        kind = model_class(module)
        if name in original and kind is not original[name] and not hasattr(module, "base_layer"):
            return f"its part {name} is a {kind.__name__}, where its class has a {original[name].__name__}"
    return None


_original_modules: dict[tuple[type, str], dict[str, type]] = {}  # shared by the roles of a run


def model_class(model: Any) -> type:
    """The class of a model or a part, without the subclasses that FSDP2 and `verl.models.fused_norms` create of it."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(model).__mro__[2 if isinstance(model, FSDPModule) else 0]
    return getattr(kind, "unfused", kind)


def _states(model: Any, ids: Tensor) -> Tensor:
    """Logits [b s V], or the last hidden states [b s D] of a model without a language-model head."""
    output = call_model(model, input_ids=ids, use_cache=False)
    return output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state


def _tell(model: Any, finding: PathFinding) -> None:
    """Log which execution paths are not used for a model."""
    kind, paths = type(model).__name__, finding.paths
    # Without the build suffix, such as +cpu
    _tell_versions(**{name: str(installed(name)).partition("+")[0] for name in family_table().versions})
    slow = []
    if paths.scoring in ("right_padded", "equal_lengths") or paths.reasons:
        slow.append(f"rows are scored as {paths.scoring.replace('_', ' ')} batches")
    if has_lm_head(model) and paths.cache == "none":
        slow.append("every token is computed from its whole row, without a cache")
    elif has_lm_head(model) and not paths.pads_prompts:
        slow.append("only prompts of one length are decoded together")
    if not paths.trains:
        slow.append("it is trained in evaluation mode, without gradient checkpointing")
    if slow and finding.refusal is None:
        _log.warning("%s takes a plain path: %s. %s", kind, "; ".join(slow), "".join(f"{r}." for r in paths.reasons))


@functools.cache
def _tell_versions(**versions: str) -> None:
    """Log once in a process that the table of families was made with other versions of its packages."""
    if versions != (tried := family_table().versions):
        text = "Execution paths were tried with %s; installed: %s. No effect if the first batch passes its checks."
        _log.info(text, *[", ".join(map(" ".join, x.items())) for x in (tried, versions)])


def _too_long(limit: tuple[str, int] | None, row_tokens: int) -> str | None:
    if limit is None or row_tokens <= limit[1]:
        return None
    return (
        f"the numbers of a token change with the length of its row once that exceeds a limit ({limit[0]} {limit[1]}), "
        "or there are none, so that what is drawn later changes what was drawn before. Rows of this run may be longer: "
        "lower data.max_prompt_length or rollout.max_new_tokens to stay below, or choose another model."
    )


def plainer_decoding(paths: ModelPaths) -> ModelPaths | None:
    """The next simpler decoding of single rows, with the model's own cache, then without a cache; None after that."""
    cache: CacheKind = "own" if paths.cache == "in_place" else "none"
    plain = replace(paths, cache=cache, pads_prompts=False, repeats_rows=False, drops_rows=False, shares_prefix=False)
    return None if plain == paths else plain


def decoding_name(paths: ModelPaths) -> str:
    """Description of how these paths decode."""
    caches = {
        "in_place": "decoding with a cache in place",
        "own": "decoding with the model's own cache",
        "none": "decoding without a cache",
    }
    more = [", prompts padded"] * paths.pads_prompts + [", rows repeated and dropped"] * paths.repeats_rows
    return caches[paths.cache] + "".join(more) + ", prefix shared" * paths.shares_prefix


def bound_of(weights: torch.dtype, autocast: str | None) -> float:
    """The largest `row_gaps` that rounding explains, for the narrower of the dtypes of weights and autocast."""
    narrow = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(autocast), weights)
    return max(BOUNDS.get(weights, 0.15), BOUNDS.get(narrow, 0.15))


def row_gaps(numbers: Tensor, expected: Tensor, mask: Tensor, least_tokens: int = WINDOW) -> Tensor:
    """[B] float64: the mean difference of each row, or half the mean of a `WINDOW` of consecutive tokens if larger.

    Args:
        numbers, expected: [B T]; rows in which the expected numbers are not finite have no gap.
        mask: [B T] bool.
        least_tokens: minimum divisor of the mean, because a single token of a short row may differ through rounding.
    """
    gap = torch.where(mask, (numbers - expected).abs().double(), 0.0).nan_to_num(nan=1e6, posinf=1e6)
    mean = gap.sum(dim=1) / mask.sum(dim=1).clamp_min(least_tokens)
    if gap.shape[1] > WINDOW:
        mean = mean.maximum(gap.unfold(1, WINDOW, WINDOW // 2).mean(dim=2).amax(dim=1) / 2)
        mean = mean.maximum(gap[:, -WINDOW:].mean(dim=1) / 2)
    return mean.masked_fill(~torch.isfinite(expected.masked_fill(~mask, 0.0)).all(dim=1), 0.0)


def tail_for(model: Any, row_tokens: int) -> int:
    """`TAIL`, the tokens to append to rows of up to this length, or 0 if the model may lack positions for them."""
    config = unwrapped(getattr(model, "backbone", model)).config.get_text_config()
    limits = [getattr(config, name, None) or row_tokens + TAIL for name in CONTEXT_KEYS]
    return TAIL if row_tokens + TAIL <= min(limits) else 0


def beyond_noise(gaps: Tensor, noise: Tensor) -> Tensor:
    """[B] gaps, set to 0 for rows whose gap is explained by `noise`.

    Args:
        gaps: [B] of `row_gaps`.
        noise: [B] gaps between two plain forward passes of each row, one with `TAIL` tokens appended.
    """
    return gaps.masked_fill(gaps <= NOISE_FACTOR * noise, 0.0)


def row_lengths(batch: DataProto) -> Tensor:
    """[B] tokens of each row, prompt and response; 0 for a row without a response."""
    has_response = batch["response_mask"].any(dim=1)
    return batch["attention_mask"].sum(dim=1).masked_fill(~has_response.to(batch["attention_mask"].device), 0)


def longest_row(batch: DataProto) -> int:
    """Tokens of the longest row that has a response; 0 if none has."""
    return int(row_lengths(batch).max()) if len(batch) else 0


def chosen_rows(batch: DataProto) -> list[int]:
    """Indices of the longest row, the shortest, the longest of those with the shortest prompt, and up to `GROUP` with
    the prompt of the longest; empty for an empty batch."""
    if not len(batch):
        return []
    lengths, attention = row_lengths(batch), batch["attention_mask"]
    if not int(lengths.max()):
        return [0]
    longest, width = int(lengths.argmax()), attention.shape[1] - batch["response_mask"].shape[1]
    present = lengths.masked_fill(lengths == 0, int(lengths.max()) + 1)
    padding = width - attention[:, :width].sum(dim=1)
    most_padded = int(lengths.masked_fill(padding < padding[lengths > 0].max(), -1).argmax())
    prompts = torch.cat([batch["input_ids"][:, :width], attention[:, :width]], dim=1)
    group = (prompts == prompts[longest]).all(dim=1).nonzero()[:, 0].tolist()
    return sorted({longest, int(present.argmin()), most_padded, *group[:GROUP]})
