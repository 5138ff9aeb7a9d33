"""Attribution and batch dump: the rows behind a non-finite number, and their batch in the run directory.

RUN_DIR/anomalies/step_7_actor/
    README.md            what happened, and how to load the batch
    batch.safetensors    the batch, as DataProto.save writes it
    rows.jsonl           its worst rows, worst first, one JSON object a line
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.errors import error_text
from verl.ops.masking import masked_mean, masked_sum
from verl.protocol import DataProto
from verl.tracking.jsonl import json_line
from verl.utils.redact import redact, redact_tree

_log = logging.getLogger(__name__)
# What training reads of an experience. Entropies are not among it: of a token that cannot be sampled they may be nan.
TRAINED_ON = (
    "token_level_scores", "greedy_scores", "old_log_probs", "ref_log_probs", "values",
    "token_level_rewards", "advantages", "returns",
)  # fmt: skip


@dataclass(frozen=True)
class Attribution:
    """Rows, worst first.

    Attributes:
        reason: what they are ranked by.
        weights: [B] of all rows; what is not a number ranks first.
    """

    reason: str
    weights: Tensor

    def worst(self, count: int) -> list[int]:
        """The first rows, at most this many."""
        sizes = torch.nan_to_num(self.weights.double(), nan=float("inf"), posinf=float("inf"))
        return torch.argsort(sizes, descending=True, stable=True)[:count].tolist()


def non_finite_fields(batch: DataProto) -> dict[str, Tensor]:
    """Fields that training reads, with how many numbers of each row [B] are not finite, where any is."""
    fields = ((name, batch[name]) for name in TRAINED_ON if name in batch.batch and len(batch))
    counts = {name: (~torch.isfinite(x)).reshape(len(x), -1).sum(dim=1) for name, x in fields}
    return {name: count for name, count in counts.items() if count.any()}


def blame_for(metric: str, batch: DataProto) -> Attribution:
    """Rank the rows of an experience by their part in a metric, as far as the driver can tell.

    A critic's rows by the squared error of their values before the update, an actor's by the advantages that they push
    with.
    """
    if counts := non_finite_fields(batch):
        return Attribution(
            f"numbers that are not finite in {', '.join(counts)}", torch.stack(list(counts.values())).sum(0)
        )
    if "log_prob_gap" in metric and "old_log_probs" in batch:
        mask = batch["response_mask"]
        gap = (batch["rollout_log_probs"] - batch["old_log_probs"]).abs()
        on_policy = mask if "is_on_policy" not in batch else mask & batch["is_on_policy"][:, None]
        return Attribution("mean distance of the engine's log-probs to the trainer's", _mean(gap, on_policy))
    if "advantages" not in batch:
        return Attribution("number of tokens", batch["attention_mask"].sum(dim=1))
    mask = batch["response_mask"]
    if metric.startswith("critic") and "values" in batch:
        return Attribution("mean squared error of the value", _mean((batch["returns"] - batch["values"]) ** 2, mask))
    return Attribution("sum of |advantage|", masked_sum(batch["advantages"].double().abs(), mask, dim=-1))


def described(batch: DataProto, row: int, weight: float, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """One row for people: its texts and columns, and mean, least and greatest of each number it has per token."""
    fields: dict[str, Any] = {"row": row, "weight": weight}
    fields |= {name: column[row] for name, column in batch.non_tensor_batch.items()}
    if "response_text" not in fields and "input_ids" in batch:
        fields["text"] = decode(batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist())
    for name, tensor in batch.batch.items():
        if tensor.is_floating_point():
            x = tensor[row]
            if "response_mask" in batch and x.shape == batch["response_mask"][row].shape:
                x = x[batch["response_mask"][row]]
            fields[name] = _summary(x.double().reshape(-1))
    return fields


def _summary(x: Tensor) -> dict[str, float]:
    if not x.numel():
        return {}
    wrong = int((~torch.isfinite(x)).sum())
    summary = {"mean": float(x.mean()), "min": float(x.min()), "max": float(x.max())}
    return {**summary, "not_finite": wrong} if wrong else summary


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(x.double(), mask, dim=-1)


_README = """# {title}

{story}

`rows.jsonl` has {count} of the {total} rows, worst first: {reason}. `row` is the number of a row in the batch.

```python
from verl.protocol import DataProto

batch = DataProto.load("{file}")
print(batch)
print(batch[{first}]["response_mask" if "response_mask" in batch else "attention_mask"])
```
"""


class BatchDump:
    """Writes at most `limit` batches below `run_dir/anomalies`. A failed write does not stop the run."""

    def __init__(self, run_dir: Path, limit: int):
        self._directory, self._left = run_dir / "anomalies", limit

    @property
    def is_full(self) -> bool:
        return self._left <= 0

    def write(
        self, name: str, title: str, story: str, batch: DataProto, rows: Sequence[dict[str, Any]], reason: str
    ) -> Path | None:
        """Write one directory, whole or not at all, with `rows` ranked by `reason`; a number is added to a name that is
        taken. None where the limit is reached or the disk refuses."""
        if self.is_full:
            return None
        self._left -= 1
        directory, number = self._directory / name, 1
        while directory.exists():
            number += 1
            directory = self._directory / f"{name}_{number}"
        unfinished = directory.with_name(f"{directory.name}.{os.getpid()}.unfinished")
        try:
            unfinished.mkdir(parents=True)
            batch.save(unfinished / "batch.safetensors")
            (unfinished / "rows.jsonl").write_bytes(b"".join(json_line(redact_tree(row)) for row in rows))
            first, file = rows[0]["row"] if rows else 0, directory / "batch.safetensors"
            text = _README.format(
                title=title, story=story, count=len(rows), total=len(batch), reason=reason, first=first, file=file
            )
            (unfinished / "README.md").write_text(redact(text), encoding="utf-8", errors="backslashreplace")
            os.replace(unfinished, directory)
        except Exception as error:  # noqa: BLE001 - a full disk among others; what is at stake is the run itself
            shutil.rmtree(unfinished, ignore_errors=True)
            _log.warning("The batch of %s could not be written: %s", directory, redact(error_text(error)))
            return None
        return directory
