"""The group `storage`: which object storage, and its time-outs and retries. Credentials are never part of it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from verl.component import PREFLIGHT_TIMEOUT_S, BuildContext, Description, component
from verl.errors import ConfigError, StorageError, StorageRefused, install_command
from verl.utils.directories import unwritable
from verl.utils.redact import redact

if TYPE_CHECKING:
    from verl.storage.store import Backend, ObjectStore


PROBE = "preflight/probe"
_NOT_IN_ADDRESSES = {*"?#"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")


@component
class Storage(Description):
    """Base class of `storage=` components: objects below a prefix. Every kind has these settings.

    Args:
        prefix: common prefix of all keys, such as `experiments/one`; leading and trailing slashes are ignored.
        concurrency: the most simultaneous requests.
        part_mib: size limit of a request; larger objects are sent in parts of this size, each retried separately.
        connect_timeout_s: time-out of a connection.
        timeout_s: time-out of one request, from its start to its last byte; for a multipart upload, of each part.
        retries: the most retries of a request after a transient failure: no connection, no answer in time, status 408,
            429 or 500 and above.
        backoff_s: wait before the first retry; doubled for each further one, up to 30 s, less a random part of at most
            half.
    """

    kind: ClassVar[str] = ""

    prefix: Annotated[str, AfterValidator(lambda prefix: prefix.strip("/"))] = ""
    concurrency: PositiveInt = 8
    part_mib: Annotated[int, Field(ge=5, le=5120)] = 16
    connect_timeout_s: Annotated[float, Field(gt=0, lt=1e6)] = 10.0
    timeout_s: Annotated[float, Field(gt=0, lt=1e6)] = 60.0
    retries: NonNegativeInt = 6
    backoff_s: Annotated[float, Field(ge=0, le=30)] = 0.5

    def faults(self) -> Iterator[str]:
        names = self.prefix.split("/") if self.prefix else []
        if not {"", ".", ".."}.isdisjoint(names) or not self.prefix.isprintable() or "\\" in self.prefix:
            yield f"prefix is {self.prefix!r}: expected names joined by slashes, such as experiments/one."
        elif redact(self.prefix) != self.prefix:
            yield "prefix looks like a secret (not shown), which no configuration may hold."

    @property
    def address(self) -> str:
        """Address for messages and for `storage_at`, such as `s3://bucket/prefix`."""
        raise NotImplementedError

    def below(self, part: str) -> Storage:
        """The same storage with `part` appended to the prefix."""
        return dataclasses.replace(self, prefix="/".join(name for name in (self.prefix, part) if name))

    def build(self, context: BuildContext) -> ObjectStore:
        return self.connect()

    @property
    def hasty(self) -> Storage:
        """The same storage with time-outs of a few seconds, for checks."""
        limits = {name: min(getattr(self, name), PREFLIGHT_TIMEOUT_S) for name in ("connect_timeout_s", "timeout_s")}
        return dataclasses.replace(self, retries=min(1, self.retries), backoff_s=min(0.5, self.backoff_s), **limits)

    def refuse_absence(self) -> None:
        """Check access: get a missing object, and put and delete an empty one.

        Raises:
            StorageError: the store does not answer, or refuses.
        """
        with self.hasty.connect() as store:
            store.list(PROBE)
            store.put(PROBE, b"")
            with contextlib.suppress(StorageError):  # an empty object left behind is harmless
                store.delete(PROBE)

    def connect(self) -> ObjectStore:
        """Make the store; no request is sent."""
        from verl.storage.store import ObjectStore

        return ObjectStore(self, self.backend())

    def backend(self) -> Backend:
        """Make the backend for single requests."""
        raise NotImplementedError


@component
class LocalStorage(Storage):
    """A directory, such as one on a network file system. See `Storage` for the others.

    Args:
        path: the directory; created by the first put.
    """

    kind: ClassVar[str] = "local"

    path: str

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if not self.path:
            yield "path is '': expected a directory."
        elif Path(self.path).exists() and not Path(self.path).is_dir():
            yield f"path is {self.path!r}: it is not a directory."

    @property
    def address(self) -> str:
        return f"file://{Path(self.path, self.prefix).absolute()}"

    def refuse_absence(self) -> None:
        if (fault := unwritable(Path(self.path))) is not None:
            raise StorageRefused(fault)

    def backend(self) -> Backend:
        from verl.storage.store import LocalBackend

        return LocalBackend(Path(self.path, self.prefix).absolute())


@component
class BucketStorage(Storage):
    """Base class of cloud stores. See `Storage` for the others.

    Args:
        bucket: an existing bucket.
        endpoint_url: of the service; null for the cloud's default.
        conditional_put: whether the store supports conditional puts, which never replace an object. Without them two
            trainers on one prefix may notice each other too late.
    """

    bucket: str | None = None
    endpoint_url: str | None = None
    conditional_put: bool = True

    def faults(self) -> Iterator[str]:
        if importlib.util.find_spec("obstore") is None:
            yield (
                f"_target_ is {type(self).__name__}: needs obstore, which is not installed. Run: "
                f"{install_command('obstore')}"
            )
        yield from super().faults()
        if not self.bucket:
            yield f"bucket is null: give that of an existing bucket, or export VERL_BUCKET with storage={self.kind}."
        elif not _BUCKET.fullmatch(self.bucket):
            yield f"bucket is {redact(self.bucket)!r}: expected the name of a bucket only; the rest belongs in prefix."
        if _NOT_IN_ADDRESSES & {*self.prefix}:
            yield f"prefix is {redact(self.prefix)!r}: no address may have a ? or #, and resume= needs one."
        if self.endpoint_url is not None:
            yield from _endpoint_faults(self.endpoint_url)

    @property
    def address(self) -> str:
        return f"{self.kind}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def backend(self) -> Backend:
        from verl.storage.buckets import connect

        return connect(self)


@component
class S3Storage(BucketStorage):
    """S3 and compatible stores. Credentials come from the environment (`AWS_ACCESS_KEY_ID`, ...) or the role of the
    machine, not from `~/.aws`; `AWS_ENDPOINT_URL` is used too. See `BucketStorage` for the others.

    Args:
        region: null for that of the environment.
    """

    kind: ClassVar[str] = "s3"

    region: str | None = None


@component
class OSSStorage(BucketStorage):
    """Alibaba Cloud OSS. Credentials come from `OSS_ACCESS_KEY_ID` and `OSS_ACCESS_KEY_SECRET` in the environment, and
    so does the endpoint (`OSS_ENDPOINT`) without `endpoint_url`. See `BucketStorage` for the settings."""

    kind: ClassVar[str] = "oss"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.endpoint_url is None and not os.environ.get("OSS_ENDPOINT"):
            yield (
                "endpoint_url is null, and OSS has one for each region: give that of the bucket, such as "
                "endpoint_url=https://oss-cn-hangzhou.aliyuncs.com, or export OSS_ENDPOINT."
            )


@component
class GCSStorage(BucketStorage):
    """Google Cloud Storage. Credentials come from `GOOGLE_APPLICATION_CREDENTIALS`, gcloud, or the machine. See
    `BucketStorage` for the settings."""

    kind: ClassVar[str] = "gcs"


KINDS: dict[str, type[Storage]] = {kind.kind: kind for kind in (LocalStorage, S3Storage, OSSStorage, GCSStorage)}
SCHEMES = {"s3": S3Storage, "oss": OSSStorage, "gcs": GCSStorage, "gs": GCSStorage}


def is_address(text: str) -> bool:
    """Whether a text is an address such as `s3://bucket/prefix` and not a local path."""
    return "://" in text


def storage_at(address: str, like: Storage | None = None) -> Storage:
    """The storage component for an address.

    >>> storage_at("s3://models/runs/one").prefix
    'runs/one'

    Args:
        address: kind, bucket and prefix.
        like: if it is of the same kind, its other settings are used.
    Raises:
        ConfigError: the address is invalid.
    """
    scheme, _, place = address.partition("://")  # not by urllib, which drops what follows # and ?, and line ends
    if scheme == "file" and place.startswith("/"):
        return LocalStorage(path=place)
    kind, (bucket, _, prefix) = SCHEMES.get(scheme), place.partition("/")
    if kind is None or _NOT_IN_ADDRESSES & {*place} or "@" in bucket:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(
            f"{redact(address)!r} is not an address of a storage: expected one of {known}, a bucket and a prefix, or "
            "file:// and the whole path of a directory."
        )
    if type(like) is kind:
        return dataclasses.replace(like, bucket=bucket, prefix=prefix)  # type: ignore[call-arg]
    return kind(bucket=bucket, prefix=prefix)  # type: ignore[call-arg]


def storage_from(keys: dict[str, Any]) -> Storage:
    """The storage component for a mapping such as `{"type": "s3", "bucket": "models"}`.

    Raises:
        ConfigError: `type` or another key is unknown.
    """
    settings = dict(keys)
    name = settings.pop("type", None)
    kind = KINDS.get(str(name))
    if kind is None:
        raise ConfigError(f"type is {name!r}: expected one of {', '.join(KINDS)}.")
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := [key for key in settings if key not in known]:
        raise ConfigError(
            [
                f"{key} is not a setting of {name}, which has {', '.join(known)}. Credentials come from the "
                "environment."
                for key in unknown
            ]
        )
    return kind(**settings)


def _endpoint_faults(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        held = parts.username or parts.password
    except ValueError as error:
        yield f"endpoint_url is not an address ({error})."
        return
    if held:
        yield "endpoint_url contains a user name or a password. Put credentials in the environment."
    elif parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        yield f"endpoint_url is {redact(url)!r}: expected an address such as http://localhost:9000."
