"""A server on loopback that speaks the S3 protocol of OSS, as far as one bucket is asked: moto's S3 server, and before
it what differs: the header that refuses to replace, and its error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from storage.s3_server import Fault, Request, proxy_before

CREDENTIALS = {"OSS_ACCESS_KEY_ID": "testing-key-id", "OSS_ACCESS_KEY_SECRET": "testing-secret-0123456789"}
TAKEN = b"<Error><Code>FileAlreadyExists</Code><Message>The object you specified already exists.</Message></Error>"


@contextlib.contextmanager
def oss_server(s3_url: str) -> Iterator[str]:
    """The address of a server with the bucket BUCKET; credentials are in the environment meanwhile."""
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ |= CREDENTIALS
    try:
        with proxy_before(s3_url) as proxy:
            proxy.misbehave = differences
            yield proxy.url
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def differences(request: Request) -> Fault:
    """What OSS does otherwise than S3: the condition of a put is a header of its own, and there is no bulk delete."""
    if request.method == "POST" and request.path.endswith("?delete"):
        return Fault(status=400, body=b"<Error><Code>InvalidRequest</Code></Error>")
    headers = {name: value for name, value in request.headers.items() if name.lower() != "if-none-match"}
    if headers.pop("x-oss-forbid-overwrite", None) == "true" and request.method == "PUT":
        return Fault(passed_on=True, headers={**headers, "If-None-Match": "*"}, statuses={412: (409, TAKEN)})
    return Fault(passed_on=True, headers=headers)
