"""A server on loopback that speaks the protocol of Google Cloud Storage: an emulator, and before it what the emulator
lacks, the condition that an object is not there yet."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from urllib.parse import parse_qs, unquote, urlsplit

from storage.s3_server import BUCKET, Fault, Proxy, Request, proxy_before

EMULATOR = "STORAGE_EMULATOR_HOST"  # where it is set, gcsfs asks for no credentials


@contextlib.contextmanager
def gcs_server() -> Iterator[str]:
    """The address of a server with the bucket BUCKET, which the environment names meanwhile."""
    from gcp_storage_emulator.server import create_server

    emulator = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    emulator.start()
    host, port = emulator._api._httpd.socket.getsockname()[:2]
    before = os.environ.get(EMULATOR)
    try:
        with proxy_before(f"http://{host}:{port}") as proxy:
            proxy.misbehave, proxy.is_serial = Conditions(proxy), True  # what is refused as being there can be read
            os.environ[EMULATOR] = proxy.url
            yield proxy.url
    finally:
        os.environ.pop(EMULATOR, None) if before is None else os.environ.__setitem__(EMULATOR, before)
        emulator.stop()


class Conditions:
    """Refuses to create what is there, with status 412, as the real service does."""

    def __init__(self, proxy: Proxy):
        self._proxy = proxy
        self._there: set[str] = set()

    def __call__(self, request: Request) -> Fault | None:
        """Called for one request at a time."""
        address = urlsplit(request.path)
        if request.method == "DELETE":
            self._there.discard(unquote(address.path.rpartition("/o/")[2]))
        if request.method != "POST" or "/upload/" not in address.path:
            return None
        asked = parse_qs(address.query)
        name = asked.get("name", [None])[0] or _name_in(request.body)
        if asked.get("ifGenerationMatch") == ["0"] and name in self._there:
            return Fault(status=412, body=b'{"error": {"code": 412, "message": "conditionNotMet"}}')
        self._there.add(name)
        return None


def _name_in(body: bytes) -> str:
    """The name in the first part of an upload of several parts."""
    return json.loads(body.split(b"\n\n", 2)[1].split(b"\n--", 1)[0])["name"]
