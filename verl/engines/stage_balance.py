"""Assigns layers to pipeline stages by cost, and counts the parameters of a stage. Arithmetic only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from verl.models.model_stats import ModelStats


def stage_bounds(costs: Sequence[float], num_stages: int, last: float = 0.0) -> list[int]:
    """Split layers into consecutive stages so that the largest cost of a stage is minimal.

    Args:
        costs: cost of each layer.
        num_stages: number of stages, at most the number of layers.
        last: cost of the output head, which the last stage has in addition.
    Returns:
        Index of the first layer of each stage, then the number of layers.
    """
    count = len(costs)
    assert count >= num_stages
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        head = last if stage == num_stages else 0.0
        for stop in range(stage, count + 1):
            for start in range(stage - 1, stop):
                worst = max(best[stage - 1][start], prefix[stop] - prefix[start] + head)
                if worst < best[stage][stop]:
                    best[stage][stop], cut[stage][stop] = worst, start
    bounds = [count]
    for stage in range(num_stages, 0, -1):
        bounds.append(cut[stage][bounds[-1]])
    return bounds[::-1]


def largest_stage(sizes: ModelStats, num_stages: int) -> int:
    """Parameters of the largest stage: the embedding is on the first, the head on the last, tied or not."""
    block = (sizes.parameters - sizes.embedding_elements) // max(sizes.layers, 1)
    table = sizes.vocabulary * sizes.hidden
    bounds = stage_bounds([float(block)] * sizes.layers, num_stages, float(table))
    counts = [(stop - start) * block for start, stop in itertools.pairwise(bounds)]
    return max(counts[0] + table, counts[-1] + table, *counts)
