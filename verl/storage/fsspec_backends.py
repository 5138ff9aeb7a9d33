"""Backends over fsspec: S3 (s3fs), OSS (ossfs), GCS (gcsfs). The only module that imports any of them.

Each is made from its component of `verl.storage.config`. For S3, single requests are sent through the client that s3fs
creates, so that time-outs, retries, conditional puts and multipart uploads are controlled here; the others use the
methods of fsspec.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import random
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from fsspec.asyn import sync

from verl.errors import ObjectDamaged, ObjectNotFound, StorageRefused, VerlError
from verl.storage.store import MIB, AlreadyExists, Backend, Data, StoredObject, TransientError
from verl.utils.redact import redact

# Transient client errors; every status from 500 and a missing answer are transient too.
PASSING_STATUS = {408, 409, 425, 429}
PASSING_CODES = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "BadDigest", "IncompleteBody"}
PART_BYTES = 16 * 2**20  # a large object in one request gets `timeout_s` per this many bytes
# limit of an answer that is no object: a page of a listing has 1,000 keys of 1 KiB, or an error
ANSWER_BYTES = 16 * MIB
LISTING_BYTES = 512 * MIB  # limit of a whole listing: the keys, and ENTRY_BYTES for each object and each page
ENTRY_BYTES = 150
# One page: keys, relative to the prefix of the storage, and sizes, as the store gives them; and the token of the next.
Page = tuple[Iterable[tuple[Any, Any]], str | None]
OSS_CREATE = {"x-oss-forbid-overwrite": "true"}


class S3Backend(Backend):
    """S3 and compatible stores. Every body is sent with a checksum that the store verifies."""

    has_parts = True

    def __init__(self, storage: Any):
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError

        self._client_error, self._no_answer = ClientError, BotoCoreError
        self._refusals = (NoCredentialsError, ParamValidationError)
        self._bucket, self._prefix = storage.bucket, f"{storage.prefix}/" if storage.prefix else ""
        self._timeout_s = storage.timeout_s
        self.is_conditional = storage.conditional_put
        limits = (storage.connect_timeout_s, storage.timeout_s, storage.concurrency)
        self.fs = _s3_client(storage.endpoint_url, storage.region, *limits)

    def put(self, key: str, data: Data) -> None:
        self._call(key, lambda s3: s3.put_object(**self._at(key), Body=bytes(data)))

    def create(self, key: str, data: Data) -> None:
        self._call(key, lambda s3: s3.put_object(**self._at(key), Body=bytes(data), IfNoneMatch="*"))

    def get(self, key: str, begin: int, end: int) -> bytes:
        async def read(s3: Any) -> bytes:
            answer = await s3.get_object(**self._at(key), Range=f"bytes={begin}-{end - 1}")
            data = bytearray()
            async with answer["Body"] as body:
                while piece := await body.read(end - begin + 1 - len(data)):
                    data += piece
                    if len(data) > end - begin:  # it ignores the range
                        raise ObjectDamaged(f"{key}: the store sends more than the {end - begin} bytes asked for")
            return bytes(data)

        return self._call(key, read)

    def size(self, key: str) -> int:
        return self._call(key, lambda s3: s3.head_object(**self._at(key)))["ContentLength"]

    def list(self, prefix: str) -> list[StoredObject]:
        def page(token: str | None) -> Page:
            asked = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
            if token is not None:
                asked["ContinuationToken"] = token
            answer = self._call(prefix, lambda s3: s3.list_objects_v2(**asked))
            entries = ((_below(self._prefix, x.get("Key")), x.get("Size")) for x in answer.get("Contents", ()))
            return entries, answer.get("NextContinuationToken", "") if answer.get("IsTruncated") else None

        return _read_listing(f"s3://{self._bucket}/{self._prefix}{prefix}", page)

    def delete(self, key: str) -> None:
        self._call(key, lambda s3: s3.delete_object(**self._at(key)))

    def begin(self, key: str) -> str:
        return self._call(key, lambda s3: s3.create_multipart_upload(**self._at(key)))["UploadId"]

    def put_part(self, key: str, token: str, number: int, data: Data) -> str:
        part = {**self._at(key), "UploadId": token, "PartNumber": number, "Body": bytes(data)}
        return self._call(key, lambda s3: s3.upload_part(**part))["ETag"]

    def finish(self, key: str, token: str, parts: list[str]) -> None:
        listed = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(parts, 1)]}
        try:
            self._call(
                key,
                lambda s3: s3.complete_multipart_upload(**self._at(key), UploadId=token, MultipartUpload=listed),
            )
        except ObjectNotFound as error:  # completed already, by an attempt whose answer was lost?
            stored = self._call(key, lambda s3: s3.head_object(**self._at(key)))
            if stored["ETag"].strip('"') != _tag_of_parts(parts):
                raise TransientError(f"{key}: the store has neither the parts nor the object") from error

    def abort(self, key: str, token: str) -> None:
        self._call(key, lambda s3: s3.abort_multipart_upload(**self._at(key), UploadId=token))

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _call(self, key: str, request: Callable[[Any], Awaitable[Any]]) -> Any:
        """Send a request with a total time-out, which also ends a slow transfer."""

        async def connected() -> Any:
            return await request(await self.fs.set_session())

        async def asked() -> Any:
            return await asyncio.wait_for(connected(), self._timeout_s)

        try:
            return sync(self.fs.loop, asked)
        except VerlError:  # an answer that is too long
            raise
        except self._client_error as error:
            raise self._meaning(key, error) from error
        except self._refusals as error:
            raise StorageRefused(f"s3://{self._bucket}/{self._prefix}{key}: {redact(str(error))}") from error
        except TimeoutError as error:
            raise TransientError(f"no answer within {self._timeout_s:g} s") from error
        except (self._no_answer, OSError) as error:
            raise TransientError(str(error)) from error
        except (LookupError, TypeError, ValueError) as error:
            where, reason = f"s3://{self._bucket}/{self._prefix}{key}", ascii(str(error))[:200]
            raise ObjectDamaged(f"{where}: the store's answer is not one of S3 ({reason})") from error
        except Exception as error:
            # aiohttp's errors for a connection that broke inside a body have other base classes.
            if type(error).__module__.partition(".")[0] not in ("aiohttp", "aiobotocore", "urllib3", "http"):
                raise
            raise TransientError(str(error)) from error

    def _meaning(self, key: str, error: Any) -> Exception:
        details, status = error.response.get("Error", {}), error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
        code = str(details.get("Code", ""))
        url = f"s3://{self._bucket}/{self._prefix}{key}"
        if code == "NoSuchBucket":
            return StorageRefused(f"{url}: there is no bucket {self._bucket}; create it, or set storage.bucket")
        if status == 412:
            return AlreadyExists(key)
        if status == 404:
            return ObjectNotFound(f"{url} does not exist")
        if status >= 500 or status in PASSING_STATUS or code in PASSING_CODES:
            return TransientError(f"status {status} {code}")
        return StorageRefused(f"{url}: {redact(str(details.get('Message') or code))} (status {status} {code})")


class FsspecBackend(Backend):
    """A store accessed by the methods of fsspec.

    Args:
        fs: the file system.
        root: bucket and prefix.
        timeout_s: time-out of one request, besides those of the file system.
        create: atomically puts an object unless one exists, else raises FileExistsError; None if the store cannot.
        page: reads a page of the listing of all paths that begin with its argument; the token is that of the page
            before. Its keys are paths.
    """

    def __init__(
        self,
        fs: Any,
        root: str,
        create: Callable[[str, bytes], None] | None,
        page: Callable[[str, str | None], Page],
        timeout_s: float,
    ):
        self.fs, self._root, self._create, self._page, self._timeout_s = fs, root, create, page, timeout_s
        self.is_conditional = create is not None

    def put(self, key: str, data: Data) -> None:
        self._ask(key, lambda path: self.fs.pipe_file(path, bytes(data)))
        self._same_size(key, len(data))

    def create(self, key: str, data: Data) -> None:
        assert self._create is not None, "called only if is_conditional"
        self._ask(key, lambda path: self._create(path, bytes(data)))  # type: ignore[misc]

    def put_stream(self, key: str, pieces: Iterable[Data]) -> None:
        with _temporary_file() as whole:  # an interrupted stream would leave a truncated object
            size = sum(whole.write(piece) for piece in pieces)
            whole.flush()
            name = f"/proc/self/fd/{whole.fileno()}" if isinstance(whole.name, int) else whole.name
            self._ask(key, lambda path: self.fs.put_file(name, path), num_parts=1 + size // PART_BYTES)
        self._same_size(key, size)

    def get(self, key: str, begin: int, end: int) -> bytes:
        data = self._ask(key, lambda path: self.fs.cat_file(path, start=begin, end=end))
        return data[: end - begin]  # ossfs includes `end`

    def size(self, key: str) -> int:
        return self._ask(key, self.fs.info)["size"]

    def list(self, prefix: str) -> list[StoredObject]:
        path = f"{self._root}/{prefix}"

        def page(token: str | None) -> Page:
            entries, following = self._ask(prefix, lambda _: self._page(path, token))
            return ((_below(f"{self._root}/", key), size) for key, size in entries), following

        protocol = self.fs.protocol if isinstance(self.fs.protocol, str) else self.fs.protocol[0]
        return _read_listing(f"{protocol}://{path.lstrip('/')}", page)

    def delete(self, key: str) -> None:
        try:
            self._ask(key, self.fs.rm_file)
        except ObjectNotFound:
            return

    def _same_size(self, key: str, size: int) -> None:
        if (stored_size := self.size(key)) != size:
            raise TransientError(f"{key} has {stored_size} bytes after a put of {size}")

    def _ask(self, key: str, request: Callable[[str], Any], num_parts: int = 1) -> Any:
        path = f"{self._root}/{key}".rstrip("/")
        self.fs.invalidate_cache()  # other processes write there too
        try:
            return _within(num_parts * self._timeout_s, lambda: request(path))
        except (VerlError, TransientError, AlreadyExists):  # raised by the iterator of pieces
            raise
        except FileExistsError as error:
            raise AlreadyExists(key) from error
        except FileNotFoundError as error:
            raise ObjectNotFound(f"{path} does not exist") from error
        except PermissionError as error:
            raise StorageRefused(f"{path}: {redact(str(error))}") from error
        except (TimeoutError, OSError) as error:
            raise TransientError(str(error)) from error
        except Exception as error:
            code = getattr(error, "code", None) or getattr(error, "status", None)  # of gcsfs and oss2
            if isinstance(error, (LookupError, TypeError, ValueError)) and not str(code).isdigit():
                raise ObjectDamaged(f"{path}: the store's answer cannot be read ({ascii(str(error))[:200]})") from error
            if not str(code).isdigit():
                raise
            if int(str(code)) == 412:
                raise AlreadyExists(key) from error
            if int(str(code)) >= 500 or int(str(code)) in PASSING_STATUS:
                raise TransientError(redact(str(error))) from error
            raise StorageRefused(f"{path}: {redact(str(error))}") from error


def _below(prefix: str, key: Any) -> Any:
    """The key without the prefix of the storage; what is no text is returned as it is."""
    return key[len(prefix) :] if isinstance(key, str) else key


def _read_listing(url: str, page: Callable[[str | None], Page]) -> list[StoredObject]:
    """All pages of a listing, sorted by key.

    Args:
        url: of the store and the prefix, for messages.
        page: reads the page with a token; None for the first.
    Raises:
        ObjectDamaged: the listing is larger than LISTING_BYTES, has no end, or has entries without a key or a size.
    """
    listed: list[StoredObject] = []
    size_bytes, token = 0, None
    while True:
        entries, following = page(token)
        size_bytes += ENTRY_BYTES
        for key, size in entries:
            if not isinstance(key, str) or type(size) is not int or size < 0:
                raise ObjectDamaged(f"{url}: the store lists {ascii(key)[:200]} with the size {ascii(size)[:80]}")
            size_bytes += ENTRY_BYTES + len(key)
            if size_bytes > LISTING_BYTES:
                break
            listed.append(StoredObject(key, size))
        if following is None and size_bytes <= LISTING_BYTES:
            return sorted(listed)
        if size_bytes > LISTING_BYTES or following == token:
            raise ObjectDamaged(
                f"{url}: the store's listing has no end, or more than {LISTING_BYTES // MIB} MiB ({len(listed)} "
                "objects so far). Use a prefix (storage.prefix) with fewer objects, or delete what is not needed there."
            )
        token = following


def _answer_limit(headers: Mapping[str, str]) -> int:
    """The most bytes of an answer to a request with these headers: ANSWER_BYTES, and the range that it asks for."""
    begin, _, end = headers.get("Range", "").removeprefix("bytes=").partition("-")
    return ANSWER_BYTES + (int(end) - int(begin) + 1 if begin.isdigit() and end.isdigit() else 0)


def _too_long(url: object) -> ObjectDamaged:
    return ObjectDamaged(f"{redact(str(url))}: the store's answer has more than {ANSWER_BYTES} bytes")


def _within(timeout_s: float, call: Callable[[], Any]) -> Any:
    """Return the result of a call; a call that takes longer is abandoned in its thread.

    Raises:
        TimeoutError: the call took longer.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            answer.set_exception(error)

    threading.Thread(target=run, name="storage_request", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer within {timeout_s:g} s") from error


def _temporary_file() -> Any:
    """A file that is deleted when closed; unnamed where files can be opened by descriptor."""
    return tempfile.TemporaryFile() if os.path.isdir("/proc/self/fd") else tempfile.NamedTemporaryFile()


def oss_backend(storage: Any) -> Backend:
    """OSS by ossfs, whose `put_object` supports the header that forbids overwriting. Its own retries are off."""
    import oss2
    import ossfs  # type: ignore[import-not-found]

    class BoundedResponse(oss2.http.Response):
        def read(self, amt: int | None = None) -> bytes:
            if amt is not None:
                return super().read(amt)
            data, limit = bytearray(), _answer_limit(self.response.request.headers)
            for piece in self:
                data += piece
                if len(data) > limit:
                    self.response.close()
                    raise _too_long(self.response.url)
            return bytes(data)

    class BoundedSession(oss2.Session):
        def do_request(self, req: Any, timeout: Any) -> Any:
            return BoundedResponse(super().do_request(req, timeout).response)

    class OneTry(ossfs.OSSFileSystem):
        @property
        def dircache(self) -> dict[str, Any]:
            """Listings of this thread only: a listing of another thread may have begun before a put of this one."""
            if not hasattr(self._listings, "of_this"):
                self._listings.of_this = {}
            return self._listings.of_this

        @dircache.setter
        def dircache(self, _: Any) -> None:
            """fsspec sets a shared cache in its constructor; it is ignored."""
            self._listings = threading.local()

        def _call_oss(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
            return super()._call_oss(method_name, *args, **{**kwargs, "retry": 1})

    fs = OneTry(
        endpoint=storage.endpoint_url or os.environ.get("OSS_ENDPOINT"),
        key=os.environ.get("OSS_ACCESS_KEY_ID"),
        secret=os.environ.get("OSS_ACCESS_KEY_SECRET"),
        token=os.environ.get("OSS_SECURITY_TOKEN"),
        skip_instance_cache=True,
    )
    fs._session = BoundedSession()
    timeout_s = max(1, round(storage.connect_timeout_s))

    def page(path: str, token: str | None) -> Page:
        bucket, _, key = path.partition("/")
        options = {"prefix": key, "marker": token or "", "max_keys": 1000, "bucket": bucket, "timeout": timeout_s}
        answer = fs._call_oss("list_objects", **options)
        entries = [(f"{bucket}/{entry.key}", entry.size) for entry in answer.object_list]
        return entries, (answer.next_marker or answer.object_list[-1].key) if answer.is_truncated else None

    def create(path: str, data: bytes) -> None:
        bucket, key = fs.split_path(path)
        try:
            fs._call_oss("put_object", key, data, bucket=bucket, headers=OSS_CREATE, timeout=timeout_s)
        except Exception as error:
            if "FileAlreadyExists" in f"{error!r} {error.__cause__!r}":
                raise FileExistsError(path) from error
            raise

    return FsspecBackend(fs, _root(storage), create if storage.conditional_put else None, page, storage.timeout_s)


def gcs_backend(storage: Any) -> Backend:
    """GCS by gcsfs. Its own retries are off."""
    import aiohttp
    import gcsfs  # type: ignore[import-not-found]
    import gcsfs.retry  # type: ignore[import-not-found]

    gcsfs.retry.random = random.Random()  # retries that cannot be turned off must not use the global generator
    once: Any = gcsfs.GCSFileSystem._request

    class OneTry(gcsfs.GCSFileSystem):
        _request = once.__wrapped__

    class BoundedResponse(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                data, limit = bytearray(), _answer_limit(self.request_info.headers)
                async for piece in self.content.iter_any():
                    data += piece
                    if len(data) > limit:
                        self.close()
                        raise _too_long(self.url)
                self._body = bytes(data)
            return self._body

    fs = OneTry(
        endpoint_url=storage.endpoint_url,
        timeout=storage.timeout_s,
        cache_timeout=0,
        skip_instance_cache=True,
        session_kwargs={"response_class": BoundedResponse},
    )

    def page(path: str, token: str | None) -> Page:
        bucket, _, key = path.partition("/")
        answer: Any = fs.call("GET", "b/{}/o", bucket, prefix=key, maxResults=1000, pageToken=token, json_out=True)
        entries = [(f"{bucket}/{entry['name']}", int(entry.get("size", 0))) for entry in answer.get("items", ())]
        return entries, answer.get("nextPageToken")

    def create(path: str, data: bytes) -> None:
        fs.pipe_file(path, data, mode="create")

    return FsspecBackend(fs, _root(storage), create if storage.conditional_put else None, page, storage.timeout_s)


@functools.lru_cache(maxsize=8)
def _s3_client(
    endpoint_url: str | None, region: str | None, connect_timeout_s: float, timeout_s: float, concurrency: int
) -> Any:
    """A client shared by all storages that differ only in bucket and prefix, since creating one takes a second."""
    import s3fs

    config = {
        "connect_timeout": connect_timeout_s,
        "read_timeout": timeout_s,
        "retries": {"max_attempts": 0},
        "max_pool_connections": max(10, concurrency),
        "http_session_cls": _bounded_session(),
    }
    client = {"region_name": region} if region else {}
    return s3fs.S3FileSystem(
        endpoint_url=endpoint_url, config_kwargs=config, client_kwargs=client, skip_instance_cache=True
    )


@functools.cache
def _bounded_session() -> Any:
    """The HTTP session of aiobotocore, with a limit for answers that it reads whole."""
    from aiobotocore.httpsession import AIOHTTPSession

    class BoundedSession(AIOHTTPSession):
        async def send(self, request: Any) -> Any:
            is_object, request.stream_output = request.stream_output, True
            answer = await super().send(request)
            if not is_object or answer.status_code >= 300:
                data = bytearray()
                async for piece in answer.raw.content.iter_any():
                    data += piece
                    if len(data) > ANSWER_BYTES:
                        answer.raw.close()
                        raise _too_long(request.url)
                answer._content = bytes(data)
            return answer

    return BoundedSession


def _root(storage: Any) -> str:
    return f"{storage.bucket}/{storage.prefix}".rstrip("/")


def _tag_of_parts(parts: list[str]) -> str:
    """The ETag of S3 for a multipart object: the digest of the parts' digests, and their number."""
    digests = b"".join(bytes.fromhex(tag.strip('"')) for tag in parts)
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
