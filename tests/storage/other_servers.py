"""Servers on loopback that speak the protocols of Google Cloud Storage and of OSS, as far as one bucket is asked:
moto's S3 server, whose requests are nearly the same, and before it what differs."""

import contextlib
import os
from collections.abc import Callable, Iterator
from unittest.mock import patch
from urllib.parse import quote, unquote

from storage.s3_server import Fault, Request, proxy_before

OSS_KEYS = {"OSS_ACCESS_KEY_ID": "testing-key-id", "OSS_ACCESS_KEY_SECRET": "testing-secret-0123456789"}
TAKEN = b"<Error><Code>FileAlreadyExists</Code><Message>The object you specified already exists.</Message></Error>"
SIGNED = "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


@contextlib.contextmanager
def gcs_server(s3_url: str) -> Iterator[str]:
    """The address of a server with the bucket BUCKET, which the environment names meanwhile, without credentials."""
    with server(s3_url, as_gcs) as url, patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": url}):
        yield url


@contextlib.contextmanager
def oss_server(s3_url: str) -> Iterator[str]:
    """The address of a server with the bucket BUCKET; credentials are in the environment meanwhile."""
    with server(s3_url, as_oss) as url, patch.dict(os.environ, OSS_KEYS):
        yield url


@contextlib.contextmanager
def server(s3_url: str, differences: Callable[[Request], Fault]) -> Iterator[str]:
    with proxy_before(s3_url) as proxy:
        proxy.misbehave = differences
        yield proxy.url


def as_gcs(request: Request) -> Fault:
    """What GCS does otherwise than S3: the condition of a put, and paths."""
    headers = {name: value for name, value in request.headers.items() if name.lower() != "authorization"}
    headers["Authorization"] = SIGNED
    if headers.pop("x-goog-if-generation-match", None) == "0":
        headers["If-None-Match"] = "*"
    path, mark, query = request.path.partition("?")
    return Fault(passed_on=True, path=quote(unquote(path)) + mark + query, headers=headers)


def as_oss(request: Request) -> Fault:
    """What OSS does otherwise than S3: the condition of a put is a header of its own, and there is no bulk delete."""
    if request.method == "POST" and request.path.endswith("?delete"):
        return Fault(status=400, body=b"<Error><Code>InvalidRequest</Code></Error>")
    headers = {name: value for name, value in request.headers.items() if name.lower() != "if-none-match"}
    if headers.pop("x-oss-forbid-overwrite", None) == "true" and request.method == "PUT":
        return Fault(passed_on=True, headers={**headers, "If-None-Match": "*"}, statuses={412: (409, TAKEN)})
    return Fault(passed_on=True, headers=headers)
