"""A model whose weights of each version are known, and comparisons of rows that it drew."""

from collections.abc import Sequence
from typing import Any

import torch
from roles import plain_log_probs


class VersionedModel:
    """Weights of version 0, and for each later one the same noise, `scale` times the version."""

    def __init__(self, model: Any, scale: float):
        self.model, self.scale = model, scale
        self.first = {name: x.clone() for name, x in model.state_dict().items()}

    def load(self, version: int) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, x in self.model.state_dict().items():
                noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                x.copy_(self.first[name] + self.scale * version * noise)

    def gap(self, rows: Any, version: int) -> float:
        """Largest distance of log-probs of a version's tokens from those of a plain forward pass with its weights."""
        self.load(version)
        worst = 0.0
        for row in range(len(rows)):
            plain = plain_log_probs(self.model, rows, row)
            is_of_version = (rows["token_versions"][row] == version)[: len(plain)]
            gaps = (plain - rows["rollout_log_probs"][row][: len(plain)]).abs()
            worst = max(worst, float((gaps * is_of_version).max()))
        return worst


def same_rows(one: Sequence[Any], other: Sequence[Any]) -> None:
    """Batches are equal bit by bit, and so are the turns of their episodes."""
    for left, right in zip(one, other, strict=True):
        assert left.batch.keys() == right.batch.keys()
        assert [name for name, x in left.batch.items() if not x.equal(right[name])] == []
        if "episode" in left.non_tensor_batch:
            turns = [[[turn["text"] for turn in record["turns"]] for record in x["episode"]] for x in (left, right)]
            assert turns[0] == turns[1]
