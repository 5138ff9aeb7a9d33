"""Dynamic sampling (DAPO): selects the groups of responses that a step trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from verl.component import Description, component
from verl.errors import RewardError
from verl.ops.masking import centred_in_groups
from verl.protocol import DataProto


@component
class DynamicSampling(Description):
    """Dynamic sampling of DAPO: train on groups with different rewards, and generate for further prompts in place of
    the others.

    A group with equal rewards has zero advantage and thus no gradient; it only reduces the mean over the batch.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 11 in sec. 3.2.
    Differs: the paper samples until the batch is full; here at most `max_rounds` times, and a step trains on the groups
    found by then. Surplus groups are dropped. A prompt is used once per step.
    Degenerate: a group of one is never mixed; no mixed group at all is an error or a step without an update.

    Metrics: `selection/rounds`, `selection/groups` (generated), `selection/kept_share` (fraction that was kept),
    `selection/reward_mean` over all generated groups, and `selection/skipped`, 1 for a step without an update.

    Args:
        max_rounds: the most rounds of generation per step, at least 1.
        on_none: what to do if no group is left: an error, or skip the update.
    Raises:
        ConfigError: max_rounds below 1.
    """

    max_rounds: PositiveInt = 4
    on_none: Literal["error", "skip"] = "error"

    def __call__(self, scores: Tensor, group_ids: Tensor) -> Tensor:
        """True for each row [B] of a group whose scores [B] are not all equal."""
        differs = centred_in_groups(scores, group_ids, torch.ones_like(scores)) != 0
        return torch.isin(group_ids, group_ids[differs])


def kept_groups(sampled: Sequence[DataProto], selection: DynamicSampling) -> list[DataProto]:
    """The selected groups of all rounds, one batch each, in order of generation.

    Args:
        sampled: rows of each round, with `score` and `group_ids`.
        selection: the rule.
    """
    informative = []
    for rows in sampled:
        chosen = rows[selection(_scores(rows), rows["group_ids"])]
        informative += [chosen[chosen["group_ids"] == label] for label in chosen["group_ids"].unique().tolist()]
    return informative


def concat_groups(groups: Sequence[DataProto]) -> DataProto:
    """Concatenate groups, with new `group_ids`, since those of each round begin at 0."""
    rows = DataProto.concat([group.select([name for name in group.batch if name != "group_ids"]) for group in groups])
    numbers = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group) for group in groups]))
    return rows.union(DataProto.from_dict({"group_ids": numbers}))


def selection_metrics(sampled: Sequence[DataProto], kept: Sequence[DataProto]) -> dict[str, float]:
    """Metrics, see `DynamicSampling`; for a step without an update also zero counts of trained rows."""
    groups, scores = sum(len(rows["group_ids"].unique()) for rows in sampled), torch.cat([*map(_scores, sampled)])
    metrics = {
        "selection/rounds": float(len(sampled)),
        "selection/groups": float(groups),
        "selection/kept_share": len(kept) / max(groups, 1),
        **({"selection/reward_mean": float(scores.mean())} if len(scores) else {}),
        "selection/skipped": float(not kept),
    }
    return metrics if kept else metrics | {"perf/samples": 0.0, "perf/tokens": 0.0}


def no_group_error(sampled: Sequence[DataProto]) -> RewardError:
    """The error of a step that found no mixed group."""
    scores = torch.cat([_scores(rows) for rows in sampled])
    groups = sum(len(rows["group_ids"].unique()) for rows in sampled)
    low, high = float(scores.min()), float(scores.max())
    return RewardError(
        f"No group of mixed rewards among {groups} prompts in {len(sampled)} rounds (rewards from {low:g} to "
        f"{high:g}): the task is too easy or too hard for this policy, or the reward is constant. Raise "
        "trainer.group_size or algorithm.selection.max_rounds, or set algorithm.selection.on_none=skip."
    )


def _scores(rows: DataProto) -> Tensor:
    return torch.tensor(rows["score"].astype(float))
