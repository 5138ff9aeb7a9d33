"""Files and shared memory of one engine under names of its own, and all of it removed, however its processes end.

/dev/shm/verl_engine_X/                  the model's configuration, adapters
/dev/shm/verl_engine_X_*, sem.verl_..._X  what vLLM's workers share (tensor parallel)
TMPDIR/verl_engine_X.tmp/                TMPDIR of the engine's processes
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from verl.utils.kernel_cache import VARIABLE as KERNEL_CACHE_VARIABLE
from verl.utils.kernel_cache import kernel_cache_directory
from verl.utils.orphan_cleanup import CLEANUP, SHARED_MEMORY, remove_shared_memory

NAME_VARIABLE = "VERL_ENGINE_NAME"  # how the names of shared memory begin that the engine's processes make


class EngineFiles:
    """The directories of one engine. Should this process be killed, its clean-up process removes them.

    Attributes:
        name: how the names of shared memory begin.
        directory: for files that are small or soon read; in memory where the system has a place for that.
        temporary: TMPDIR of the engine's processes.
    """

    def __init__(self):
        self.name = f"verl_engine_{secrets.token_hex(6)}"
        in_memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self.directory = in_memory / self.name
        self.temporary = Path(tempfile.gettempdir()).absolute() / f"{self.name}.tmp"
        of_trainer = f"torch_{os.getpid()}_"  # made by torch for handles of memory on a GPU
        self._registered = CLEANUP.register(
            directories=[self.directory, self.temporary], shared_memory=[*self._shared_memory, of_trainer]
        )
        self.directory.mkdir(mode=0o700)
        self.temporary.mkdir(mode=0o700)

    def variables(self) -> dict[str, str]:
        """Environment of the engine's processes."""
        return {
            NAME_VARIABLE: self.name,
            "TMPDIR": str(self.temporary),
            "VLLM_RPC_BASE_PATH": str(self.temporary),  # for sockets
            KERNEL_CACHE_VARIABLE: str(kernel_cache_directory() or self.temporary / "torchinductor"),
        }

    def end_with_trainer(self, process_group: int) -> int:
        """Have a process group killed if this process is. Returns a number for `ended`."""
        return CLEANUP.register(process_groups=[process_group])

    def ended(self, number: int) -> None:
        """The processes of a group are gone: remove what they shared, and what they left in TMPDIR."""
        CLEANUP.withdraw(number)
        self._remove_shared_memory()
        for path in self.temporary.glob("*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything. May be called again."""
        self._remove_shared_memory()
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.temporary, ignore_errors=True)
        CLEANUP.withdraw(self._registered)

    @property
    def _shared_memory(self) -> list[str]:
        return [f"{self.name}_", f"sem.{self.name}_"]

    def _remove_shared_memory(self) -> None:
        for prefix in self._shared_memory:
            remove_shared_memory(prefix)
