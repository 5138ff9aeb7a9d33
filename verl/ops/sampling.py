"""Top-k and top-p filtering, and inverse-CDF sampling from one uniform number per row."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.ops.determinism import plain_kernels

# Numbers of top entries in which the nucleus is searched before all V are sorted; the first is nearly always enough.
_NUCLEUS_WIDTHS = (256, 4096)


def filter_logits(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Set logits outside of the top-k and the nucleus to -inf.

    The nucleus is the smallest set of most likely tokens whose mass reaches top_p, taken within the top-k and with
    its mass renormalised (Holtzman et al. 2020, arXiv:1904.09751, sec. 3.1). Both cut by value: tokens tied with the
    last one kept are kept too, so the result depends neither on the order of tokens nor on the device. The most
    likely token is always kept.

    Args:
        logits: [B, V], already divided by the temperature.
        top_k: number of tokens to keep; 0, or V and more, keeps all.
        top_p: mass to keep, in (0, 1]; 1 keeps all.
    Returns:
        [B, V] of the same dtype; `logits` itself if nothing is filtered.
    Raises:
        ValueError: top_k below 0, or top_p outside (0, 1].
    """
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}: must be 0 (keep all) or more.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: must lie in (0, 1].")
    if 0 < top_k < logits.shape[-1]:
        logits = _cut_below(logits, logits, logits.topk(top_k, dim=-1).values[:, -1:])
    if top_p < 1:
        probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        logits = _cut_below(logits, probs, _nucleus_floor(probs, top_p))
    return logits


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds u * total: one sample per row for u uniform in [0, 1).

    Never returns an index of probability zero, even for u = 0 or u just below 1. Sums are in float64. On a GPU rows
    without mass are not refused, to avoid a synchronisation: their log-probs are NaN, which the caller refuses.

    Args:
        probs: [B, V], not negative; need not sum to 1.
        u: [B] in [0, 1).
    Returns:
        [B] int64.
    Raises:
        ValueError: a row whose mass is zero, infinite or NaN.
    """
    if probs.device.type != "cpu":
        return inverse_cdf_by_blocks(probs, u)
    cumulative = _running_sums(probs)
    total = cumulative[:, -1:]
    index = torch.searchsorted(cumulative, _below(total, u), right=True).clamp(max=probs.shape[-1] - 1)
    is_sound = (probs.gather(-1, index) > 0) & torch.isfinite(total)
    if bool(is_sound.all()):
        return index.squeeze(-1)
    return inverse_cdf_by_scan(probs, cumulative, u)


BLOCK_WIDTHS = (1024, 512, 256, 128, 64)


def inverse_cdf_by_blocks(probs: Tensor, u: Tensor) -> Tensor:
    """`inverse_cdf` for devices with slow float64, without synchronisation.

    Sums of blocks are computed in float64, then only the block of the index: no [B, V] is written.
    """
    width = next((width for width in BLOCK_WIDTHS if probs.shape[-1] % width == 0), BLOCK_WIDTHS[-1])
    short = -probs.shape[-1] % width
    blocks = (torch.nn.functional.pad(probs, (0, short)) if short else probs).unflatten(-1, (-1, width))
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = _running_sums(sums)
    target = _below(ends[:, -1:], u)
    block = _first_with_mass(ends > target, sums > 0)
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, width)).squeeze(1)
    index = _first_with_mass(_running_sums(inside) + before > target, inside > 0)
    return (block * width + index).squeeze(-1)


def _running_sums(x: Tensor) -> Tensor:
    """Cumulative sums in float64 over the last dimension; on a GPU torch calls their kernel nondeterministic."""
    with plain_kernels(x.device):
        return x.cumsum(-1, dtype=torch.float64)


def _first_with_mass(exceeds: Tensor, has_mass: Tensor) -> Tensor:
    """[B, 1]: the first index with both; if rounding leaves none, the last index with mass."""
    both = exceeds & has_mass
    last = has_mass.shape[-1] - 1 - has_mass.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.where(both.any(-1, keepdim=True), both.to(torch.uint8).argmax(-1, keepdim=True), last)


def inverse_cdf_by_scan(probs: Tensor, cumulative: Tensor, u: Tensor) -> Tensor:
    """`inverse_cdf` by a cumulative sum in which parallel rounding may raise an entry of probability zero."""
    cumulative = cumulative.masked_fill(probs == 0, 0.0)
    total = cumulative.amax(-1, keepdim=True)
    is_mass = (torch.isfinite(total) & (total > 0)).squeeze(-1)
    if not bool(is_mass.all()):
        rows = (~is_mass).nonzero().squeeze(-1).tolist()
        raise ValueError(f"probs has no positive finite mass in rows {rows}: the logits were NaN, inf or all -inf.")
    return (cumulative > _below(total, u)).to(torch.uint8).argmax(-1)


def _below(total: Tensor, u: Tensor) -> Tensor:
    """u * total, [B, 1], strictly below total, to which the product may round up."""
    return torch.minimum(u.to(torch.float64).unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))


def _nucleus_floor(probs: Tensor, top_p: float) -> Tensor:
    """[B, 1]: the smallest probability inside the nucleus."""
    for width in _NUCLEUS_WIDTHS:
        if width < probs.shape[-1]:
            best = probs.topk(width).values
            mass = _running_sums(best)
            if bool((mass[:, -1] >= top_p).all()):
                return _floor_among(best, mass, top_p)
    best = probs.sort(-1, descending=True).values
    return _floor_among(best, _running_sums(best), top_p)


def _floor_among(best: Tensor, mass: Tensor, top_p: float) -> Tensor:
    last = (mass < top_p).sum(-1, keepdim=True).clamp(max=best.shape[-1] - 1)
    return best.gather(-1, last)


def _cut_below(logits: Tensor, ranked: Tensor, floor: Tensor) -> Tensor:
    return logits.masked_fill(ranked < floor, -torch.inf)
