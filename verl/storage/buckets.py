"""Buckets of S3, GCS and OSS, by obstore, which is Rust's object_store. The only module that imports it.

obstore starts threads with its first request: a process that was forked afterwards cannot use it. OSS is asked by its
S3 protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError, UnauthenticatedError
from obstore.store import GCSStore, S3Store

from verl.errors import ObjectDamaged, ObjectNotFound, StorageRefused, StorageUnreachable
from verl.storage.store import LONGEST_BACKOFF_S, AlreadyExists, Backend, Data, StoredObject, TransientError
from verl.utils.redact import redact

T = TypeVar("T")

PASSING_STATUS = {408, 409, 425, 429}  # and every one from 500
PASSING_CODES = {
    "RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "BadDigest", "IncompleteBody",
    "ConditionalRequestConflict",
}  # fmt: skip
EMULATOR = "STORAGE_EMULATOR_HOST"  # of Google's clients: a server that asks for no credentials
CREATE_HEADERS = {"x-oss-forbid-overwrite": "true"}  # by which OSS creates an object only where there is none
NEEDED = {
    "s3": 'AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (eval "$(aws configure export-credentials --format env)")',
    "oss": "OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
}
_NO_ANSWER = re.compile(r"HTTP error|error sending request|timed out")
# addresses that give keys to a machine of a cloud
_MACHINE = re.compile(r"https?://(169\.254\.|metadata\.google|[^/ ]+/latest/(api/token|meta-data/))")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)")


def connect(storage: Any) -> BucketBackend:
    """Make the backend of a bucket; no request is sent.

    Raises:
        StorageRefused: credentials of the environment cannot be used.
    """
    make, endpoint_url, config = {"s3": _s3, "oss": _oss, "gcs": _gcs}[storage.kind](storage)
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=storage.timeout_s),
        "connect_timeout": timedelta(seconds=storage.connect_timeout_s),
        "allow_http": endpoint_url.startswith("http://"),
    }
    bundle = os.environ.get("AWS_CA_BUNDLE")
    try:
        if bundle:
            options["root_certificate"] = Path(bundle).read_bytes()
    except OSError as error:
        raise StorageRefused(f"AWS_CA_BUNDLE is {bundle!r}: {error.strerror}. Correct it, or unset it.") from error
    backoff_s = max(storage.backoff_s, 0.001)
    longest = timedelta(seconds=max(backoff_s, LONGEST_BACKOFF_S))
    backoff = {"init_backoff": timedelta(seconds=backoff_s), "max_backoff": longest}
    retries = {"max_retries": storage.retries, "backoff": backoff, "retry_timeout": timedelta(days=10)}
    creating = {**options, "default_headers": CREATE_HEADERS if storage.kind == "oss" else {}}

    def client(options: dict[str, Any], retries: dict[str, Any]) -> Any:
        prefix = storage.prefix or None
        return make(bucket=storage.bucket, prefix=prefix, client_options=options, retry_config=retries, **config)

    once = {"max_retries": 0}
    try:
        return BucketBackend(storage, client(options, once), client(options, retries), client(creating, once))
    except (BaseError, ValueError) as error:
        used = f" (with the certificates of AWS_CA_BUNDLE, {bundle!r})" if bundle else ""
        raise StorageRefused(f"{storage.address}: {_first_line(error)}{used}") from error


class BucketBackend(Backend):
    """One bucket.

    Args:
        storage: its component.
        once: the client for requests, each tried once: `RetryPolicy` repeats them.
        parts: that for large objects, whose parts it repeats.
        creating: that for puts under the condition that there is no such object.
    """

    def __init__(self, storage: Any, once: Any, parts: Any, creating: Any):
        self._url, self._bucket, self._kind = storage.address, storage.bucket, storage.kind
        self._concurrency, self.is_conditional = storage.concurrency, storage.conditional_put
        self._once, self._parts, self._creating = once, parts, creating
        self._has_answered = False

    def put(self, key: str, data: Data) -> None:
        self._ask(key, lambda: self._once.put(key, bytes(data), use_multipart=False))

    def create(self, key: str, data: Data) -> None:
        self._ask(key, lambda: self._creating.put(key, bytes(data), mode="create"), is_create=True)

    def put_stream(self, key: str, pieces: Callable[[], Iterable[Data]], part_bytes: int) -> None:
        sent = {"use_multipart": True, "chunk_size": part_bytes, "max_concurrency": self._concurrency}
        try:
            # obstore waits for its concurrent requests between pieces only
            slices = (memoryview(x)[i : i + part_bytes] for x in pieces() for i in range(0, len(x), part_bytes))
            self._ask(key, lambda: self._parts.put(key, slices, **sent))
        except TransientError as error:
            raise StorageUnreachable(f"put {self._url}/{key} failed: {error}") from error

    def get(self, key: str, begin: int, end: int) -> bytes:
        return bytes(self._ask(key, lambda: self._once.get_range(key, start=begin, end=end)))

    def size(self, key: str) -> int:
        return self._ask(key, lambda: self._once.head(key))["size"]

    def list(self, prefix: str) -> Iterator[StoredObject]:
        pages = self._once.list(prefix.rpartition("/")[0] or None, chunk_size=1)
        while page := self._ask(prefix, lambda: next(pages, None)):
            for found in page:
                if found["path"].startswith(prefix):
                    yield StoredObject(found["path"], found["size"])

    def delete(self, key: str) -> None:
        with contextlib.suppress(ObjectNotFound):
            self._ask(key, lambda: self._once.delete(key))

    def _ask(self, key: str, request: Callable[[], T], is_create: bool = False) -> T:
        try:
            answer = request()
        except (BaseError, FileNotFoundError) as error:
            raise self._meaning(key, error, is_create) from error
        self._has_answered = True
        return answer

    def _meaning(self, key: str, error: Exception, is_create: bool) -> Exception:
        url, text = f"{self._url}/{key}", _first_line(error)
        status = int(found[1]) if (found := re.search(r"status code: (\d{3})", text)) else 0
        code = found[1] if (found := re.search(r"<Code>(\w+)</Code>", text)) else ""
        said = found[1] if (found := re.search(r"<Message>([^<]+)</Message>", text)) else code or text
        if code == "NoSuchBucket":
            return StorageRefused(f"{url}: there is no bucket {self._bucket}; create it, or set storage.bucket")
        if is_create and isinstance(error, (AlreadyExistsError, PreconditionError)) and code not in PASSING_CODES:
            return AlreadyExists(key)
        if status >= 500 or status in PASSING_STATUS or code in PASSING_CODES:
            return TransientError(f"status {status} {code}".rstrip())
        if _MACHINE.search(text):
            if self._has_answered:  # it gave keys before
                return TransientError(text)
            return StorageRefused(f"{url}: there are no credentials. Export {NEEDED[self._kind]} ({text})")
        if isinstance(error, FileNotFoundError) or status == 404:
            return ObjectNotFound(f"{url} does not exist")
        if status == 416:
            return ObjectDamaged(f"{url} is shorter than the range asked for")
        if status:
            return StorageRefused(f"{url}: {said} (status {status} {code})")
        if "Received redirect" in text:
            return StorageRefused(f"{url}: the bucket is in another region; set storage.region, or AWS_REGION ({text})")
        if isinstance(error, UnauthenticatedError):
            return StorageRefused(f"{url}: {text}. Export {NEEDED[self._kind]}.")
        if found := _CERTIFICATE.search(str(error)):
            return StorageRefused(
                f"{url}: the server's certificate is not trusted ({found[1]}). Set AWS_CA_BUNDLE to a file with that "
                "of its authority, or correct storage.endpoint_url."
            )
        if _NO_ANSWER.search(text):
            dump = str(error).partition("HttpError")[2]
            reasons = re.findall(r'"([^"\n]+)"', dump) or re.findall(r"[A-Z]\w+", dump)
            return TransientError(redact(reasons[-1]) if reasons else text)
        return ObjectDamaged(f"{url}: the store's answer is not one of {self._kind} ({ascii(text)[:200]})")


def _s3(storage: Any) -> tuple[Any, str, dict[str, Any]]:
    """S3, with the keys of the environment or of the machine: the class, the endpoint and settings."""
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint_url = next((url for url in (storage.endpoint_url, *map(os.environ.get, variables)) if url), "")
    region = storage.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    config: dict[str, Any] = {"disable_bulk_delete": True, "region": region}
    if endpoint_url:
        config |= {"endpoint": endpoint_url, "aws_endpoint_url_s3": endpoint_url}
    return S3Store, endpoint_url, config


def _oss(storage: Any) -> tuple[Any, str, dict[str, Any]]:
    """OSS by its S3 protocol, with its own header that forbids to replace an object."""
    endpoint_url = storage.endpoint_url or os.environ.get("OSS_ENDPOINT", "")
    host = urlsplit(endpoint_url if "://" in endpoint_url else f"https://{endpoint_url}")
    has_name = not re.fullmatch(r"[\d.]+|localhost", host.hostname or "")  # OSS takes a bucket only as part of it
    endpoint_url = f"{host.scheme}://{f'{storage.bucket}.' if has_name else ''}{host.netloc}"
    named = {"access_key_id": "OSS_ACCESS_KEY_ID", "secret_access_key": "OSS_ACCESS_KEY_SECRET"}
    keys: Any = {name: os.environ.get(variable) for name, variable in named.items()}
    if None in keys.values():
        raise StorageRefused(f"{storage.address}: there are no credentials. Export {NEEDED['oss']}")
    keys |= {"token": os.environ.get("OSS_SECURITY_TOKEN"), "expires_at": None}
    config: dict[str, Any] = {
        "endpoint": endpoint_url,
        "aws_endpoint_url_s3": endpoint_url,
        "virtual_hosted_style_request": has_name,
        "region": found[1] if (found := re.search(r"oss-([a-z]+-[a-z]+(?:-?\d+)?)", host.netloc)) else "us-east-1",
        "disable_bulk_delete": True,
        "credential_provider": lambda: keys,
    }
    return S3Store, endpoint_url, config


def _gcs(storage: Any) -> tuple[Any, str, dict[str, Any]]:
    """GCS, with the keys of GOOGLE_APPLICATION_CREDENTIALS, of gcloud, or of the machine."""
    emulator = os.environ.get(EMULATOR)
    endpoint_url, config = storage.endpoint_url or emulator or "", {}
    if emulator:
        open_to_all = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        config["service_account_key"] = json.dumps({"gcs_base_url": endpoint_url, **open_to_all})
    elif endpoint_url:
        config["base_url"] = endpoint_url
    return GCSStore, endpoint_url, config


def _first_line(error: Exception) -> str:
    """The text of an error of obstore, without the dump of its structures."""
    return redact(str(error).partition("\n\nDebug source")[0][:8000])[:2000]
