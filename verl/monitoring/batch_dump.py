"""Batch dump: a batch with a non-finite number, or with a log-prob gap, in the run directory.

RUN_DIR/anomalies/step_7_actor/
    README.md            what happened, and how to load the batch
    batch.safetensors    the batch, as DataProto.save writes it
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from verl.errors import error_text
from verl.protocol import DataProto
from verl.utils.redact import redact

_log = logging.getLogger(__name__)

_README = """# {title}

{story}

```python
from verl.protocol import DataProto

batch = DataProto.load("{file}")
print(batch)
print(batch[0]["response_mask" if "response_mask" in batch else "attention_mask"])
```
"""


class BatchDump:
    """Writes at most `limit` batches below `run_dir/anomalies`. A failed write does not stop the run."""

    def __init__(self, run_dir: Path, limit: int):
        self._directory, self._left = run_dir / "anomalies", limit

    @property
    def is_full(self) -> bool:
        return self._left <= 0

    def write(self, name: str, title: str, story: str, batch: DataProto) -> Path | None:
        """Write one directory, whole or not at all; a number is added to a name that is taken. None where the limit is
        reached or the disk refuses."""
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
            text = _README.format(title=title, story=story, file=directory / "batch.safetensors")
            (unfinished / "README.md").write_text(redact(text), encoding="utf-8", errors="backslashreplace")
            os.replace(unfinished, directory)
        except Exception as error:  # noqa: BLE001 - a full disk among others; what is at stake is the run itself
            shutil.rmtree(unfinished, ignore_errors=True)
            _log.warning("The batch of %s could not be written: %s", directory, redact(error_text(error)))
            return None
        return directory
