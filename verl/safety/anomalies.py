"""Batches that went wrong, in the run directory: to be loaded again, and to be read.

RUN_DIR/anomalies/step_7_actor/
    README.md            what happened, and how to load the batch
    batch.safetensors    the batch, as DataProto.save writes it
    rows.jsonl           its worst rows, worst first, one JSON object a line
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.errors import DataProtoValidationError
from verl.protocol import DataProto
from verl.tracking.jsonl import json_line
from verl.utils.redact import redact, redact_tree

_log = logging.getLogger(__name__)

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


class Anomalies:
    """Writes at most `limit` batches below `run_dir/anomalies`. A batch that cannot be written stops nothing."""

    def __init__(self, run_dir: Path, limit: int):
        self._directory, self._left = run_dir / "anomalies", limit

    @property
    def is_full(self) -> bool:
        return self._left <= 0

    def write(
        self, name: str, title: str, story: str, batch: DataProto, rows: Sequence[dict[str, Any]], reason: str
    ) -> Path | None:
        """Write one directory, whole or not at all.

        Args:
            name: of the directory; a number is added where it is taken.
            title, story: of README.md.
            rows: lines of rows.jsonl.
            reason: what these are ranked by.
        Returns:
            The directory; None where the limit is reached or the disk refuses.
        """
        if self.is_full:
            return None
        self._left -= 1
        directory = self._free(name)
        unfinished = directory.with_name(f"{directory.name}.{os.getpid()}.unfinished")
        try:
            unfinished.mkdir(parents=True)
            _save(batch, unfinished / "batch.safetensors")
            (unfinished / "rows.jsonl").write_bytes(b"".join(json_line(redact_tree(row)) for row in rows))
            first, file = rows[0]["row"] if rows else 0, directory / "batch.safetensors"
            text = _README.format(
                title=title, story=story, count=len(rows), total=len(batch), reason=reason, first=first, file=file
            )
            (unfinished / "README.md").write_text(redact(text), encoding="utf-8", errors="backslashreplace")
            os.replace(unfinished, directory)
        except Exception as error:  # noqa: BLE001 - a full disk among others; what is at stake is the run itself
            shutil.rmtree(unfinished, ignore_errors=True)
            _log.warning(
                "The batch of %s could not be written: %s", directory, redact(f"{type(error).__name__}: {error}")
            )
            return None
        return directory

    def _free(self, name: str) -> Path:
        directory, number = self._directory / name, 1
        while directory.exists():
            number += 1
            directory = self._directory / f"{name}_{number}"
        return directory


def _save(batch: DataProto, path: Path) -> None:
    try:
        batch.save(path)
    except DataProtoValidationError:  # a column holds what JSON cannot; the tensors and texts are what matters
        texts = [name for name in batch.non_tensor_batch if name in ("prompt_text", "response_text", "score")]
        batch.select(None, texts, []).save(path)
