"""Weight updates of a server: files in a shared directory, which it is asked to read.

trainer ──> DIR/v3/*.safetensors ──> requests: read them, forget keys and values of former weights ──> v3 is removed
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.errors import ConfigError, RolloutError
from verl.http_client.client import HTTPClient
from verl.http_client.request import NotRetryable, Request
from verl.rollout.base import SyncResult
from verl.utils.directories import TemporaryDirectory

MIB = 1 << 20
RELOAD, RESET_CACHE = "/collective_rpc", "/reset_prefix_cache"
FILE_BYTES = 2**30  # size of one file, which limits the extra memory


class ServerWeightUpdate:
    """Sends weights to one server. What a kind of server is asked for is a subclass, named by its `ServerProtocol`.

    Args:
        directory: visible to trainer and server; None: a directory in memory.
    Attributes:
        needs: what the server lacks if it refuses `trial`.
    """

    needs: str

    def __init__(self, client: HTTPClient, directory: str | None):
        self.client, self._version = client, 0
        if directory is None:
            directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        base = Path(directory).expanduser()
        try:
            base.mkdir(parents=True, exist_ok=True)
            # also removed at the end of this process, even if it is killed
            self._held = TemporaryDirectory("verl_weights_", base)
        except OSError as error:
            raise ConfigError(f"transfer_dir is {str(base)!r}: cannot be written ({error}).") from error
        self.directory = Path(self._held.name)
        self.directory.chmod(0o755)  # the server may run as another user

    def trial(self) -> Request:
        """A request that changes nothing, and that the server refuses if it cannot load weights."""
        raise NotImplementedError

    def requests(self, directory: Path) -> Sequence[Request]:
        """Read the `*.safetensors` of a directory, and forget keys and values of the former weights."""
        raise NotImplementedError

    def check(self) -> None:
        """Check that the server can load new weights.

        Raises:
            ConfigError: it cannot.
        """
        report = self.client.ask([self.trial()])[0]
        assert report is not None
        if report.kind == "refused":
            raise ConfigError(
                f"weights is reload: needs {self.needs}; the server at {self.client.endpoint.base_url} says "
                f"{report.failure}. Or set weights=fixed."
            )

    def move(self, tensors: Iterable[tuple[str, Tensor]]) -> SyncResult:
        """Send weights to the server, by their names in a checkpoint.

        Raises:
            RolloutError: the server did not load them.
        """
        self._version += 1
        version = self.directory / f"v{self._version}"
        began = time.perf_counter()
        version.mkdir()
        try:
            num_tensors, num_bytes = _write(tensors, version)
            written = time.perf_counter()
            for request in self.requests(version):
                self._ask(request)
        finally:
            shutil.rmtree(version, ignore_errors=True)
        metrics = {"sync/copy_s": written - began, "sync/load_s": time.perf_counter() - written}
        note = f"{num_tensors} tensors, {num_bytes / MIB:.1f} MiB to the server"
        return SyncResult(note, metrics | {"sync/bytes": float(num_bytes)})

    def close(self) -> None:
        """Remove all files."""
        self._held.cleanup()

    def _ask(self, call: Request) -> None:
        report = self.client.ask([call])[0]
        assert report is not None
        if report.failure is not None:
            raise RolloutError(
                f"The server at {self.client.endpoint.base_url} did not take new weights: {report.failure}. Does it "
                f"see {self.directory} (rollout.transfer_dir), and serve a model like the actor's?"
            )


class WorkerReload(ServerWeightUpdate):
    """The server's workers read the files, by `/collective_rpc`."""

    needs = f"a server in its development mode, which has {RELOAD} (docs/rollout.md, A server)"

    def trial(self) -> Request:
        return _WorkerRequest({})  # no such method: nothing is done

    def requests(self, directory: Path) -> Sequence[Request]:
        return _WorkerRequest({"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}), _CacheReset()


class _WorkerRequest(Request):
    path = RELOAD

    def __init__(self, body: dict[str, Any]):
        self._body = body

    def body(self) -> Any:
        return self._body

    def parse(self, content: bytes) -> Any:
        return content  # may be empty


class _CacheReset(Request):
    """The prefix cache must be reset, or prompts would be continued from keys and values of the old weights."""

    path = RESET_CACHE

    def body(self) -> Any:
        return {}

    def read(self, answer: Any) -> None:
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise NotRetryable(f"{RESET_CACHE} answers {answer!r}: are there requests of others?")


def _write(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> tuple[int, int]:
    """Write the weights in files of at most `FILE_BYTES`, or one tensor; returns their number and bytes."""
    from safetensors.torch import save_file

    count = total = 0
    for number, part in enumerate(_chunks(tensors)):
        save_file(part, directory / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        count += len(part)
        total += sum(tensor.nbytes for tensor in part.values())
    return count, total


def _chunks(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    if part:
        yield part
