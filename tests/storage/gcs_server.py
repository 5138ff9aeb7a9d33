"""A server on loopback that speaks the XML protocol of Google Cloud Storage, as far as one bucket is asked: moto's S3
server, whose requests are nearly the same, and before it what differs: the condition of a put, and paths."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from urllib.parse import quote, unquote

from storage.s3_server import Fault, Request, proxy_before

EMULATOR = "STORAGE_EMULATOR_HOST"  # where it is set, clients ask for no credentials
SIGNED = "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


@contextlib.contextmanager
def gcs_server(s3_url: str) -> Iterator[str]:
    """The address of a server with the bucket BUCKET, which the environment names meanwhile."""
    before = os.environ.get(EMULATOR)
    try:
        with proxy_before(s3_url) as proxy:
            proxy.misbehave = differences
            os.environ[EMULATOR] = proxy.url
            yield proxy.url
    finally:
        os.environ.pop(EMULATOR, None) if before is None else os.environ.__setitem__(EMULATOR, before)


def differences(request: Request) -> Fault:
    """What GCS does otherwise than S3."""
    headers = {name: value for name, value in request.headers.items() if name.lower() != "authorization"}
    headers["Authorization"] = SIGNED
    if headers.pop("x-goog-if-generation-match", None) == "0":
        headers["If-None-Match"] = "*"
    path, mark, query = request.path.partition("?")
    return Fault(passed_on=True, path=quote(unquote(path)) + mark + query, headers=headers)
