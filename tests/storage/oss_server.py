"""A server on loopback that speaks the protocol of OSS, as far as one bucket is asked: moto's S3 server, whose requests
are the same, and before it what differs: the header that refuses to replace, errors, and the form of a listing."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from storage.s3_server import BUCKET, Fault, Request, proxy_before

CREDENTIALS = {"OSS_ACCESS_KEY_ID": "testing-key-id", "OSS_ACCESS_KEY_SECRET": "testing-secret-0123456789"}
TAKEN = b"<Error><Code>FileAlreadyExists</Code><Message>The object you specified already exists.</Message></Error>"


@contextlib.contextmanager
def oss_server(s3_url: str) -> Iterator[str]:
    """The address of a server with the bucket BUCKET; credentials are in the environment meanwhile."""
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ |= CREDENTIALS
    try:
        with proxy_before(s3_url) as proxy:
            proxy.misbehave, proxy.is_serial = Differences(), True  # what is refused as being there can be read
            yield proxy.url
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


class Differences:
    """What OSS does otherwise than S3."""

    def __init__(self) -> None:
        self._there: set[str] = set()

    def __call__(self, request: Request) -> Fault | None:
        """Called for one request at a time."""
        address = urlsplit(request.path)
        key = unquote(address.path).removeprefix(f"/{BUCKET}/")
        if request.method == "DELETE":
            self._there.discard(key)
        if request.method == "GET" and not key.strip("/").removeprefix(BUCKET):
            return Fault(passed_on=True, translated=_listing)
        if request.method == "PUT":
            headers = {name.lower(): value for name, value in request.headers.items()}
            if headers.get("x-oss-forbid-overwrite") == "true" and key in self._there:
                return Fault(status=409, body=TAKEN)
            self._there.add(key)
        return None


def _listing(body: bytes) -> bytes:
    """S3's list of objects as OSS writes it."""
    text = re.sub(r' xmlns="[^"]*"', "", body.decode())
    text = re.sub(r"<Owner>.*?</Owner>", "", text, flags=re.DOTALL)
    return text.replace("</ETag>", "</ETag><Type>Normal</Type>").encode()
