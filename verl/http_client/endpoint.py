"""Configuration of a server: checks of its settings, and the key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt

from verl.component import PREFLIGHT_TIMEOUT_S, BuildContext, Description, component
from verl.errors import ConfigError
from verl.utils.redact import looks_secret, redact

if TYPE_CHECKING:
    from verl.http_client.client import HTTPClient

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~\-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@component
class Endpoint(Description):
    """An HTTP server. The API key is never part of a configuration, only the name of its environment variable.

    Args:
        base_url: prefix of the URL of each request, such as `https://api.openai.com/v1`.
        key_variable: name of the environment variable with the API key; null for no key.
        key_header: header of the key: `Authorization` is sent as `Bearer KEY`, any other with the key only.
        headers: further headers of every request.
        max_concurrency: the most simultaneous requests.
        requests_per_minute: rate limit, including retries, evenly spaced; null for no limit.
        timeout_s: time-out of one attempt, from its start to the last byte of the answer.
        total_timeout_s: the longest time without any usable answer to a batch of requests, including retries. Each
            usable answer restarts it, so that a large batch may take longer.
        retries: the most retries of a request after a transient failure: no connection, no answer in time, status 408,
            425, 429 or 500 and above, an unusable answer.
        backoff_s: wait before the first retry, doubled for each further one up to a minute, less a random part of at
            most half. `Retry-After` of the server prolongs it and delays all requests.
        max_answer_mib: size limit of an answer.
    """

    example_values: ClassVar[Mapping[str, str]] = {"base_url": "http://localhost:8000"}

    base_url: str
    key_variable: str | None = None
    key_header: str = "Authorization"
    headers: dict[str, str] = field(default_factory=dict)
    max_concurrency: PositiveInt = 16
    requests_per_minute: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    timeout_s: Annotated[float, Field(gt=0, lt=1e9)] = 60.0
    total_timeout_s: Annotated[float, Field(gt=0, lt=1e9)] = 600.0
    retries: NonNegativeInt = 5
    backoff_s: Annotated[float, Field(ge=0, le=60)] = 0.5
    max_answer_mib: Annotated[float, Field(gt=0, lt=1e9)] = 16.0

    def url(self, path: str = "") -> str:
        """The address of a request."""
        return self.base_url.rstrip("/") + path

    @property
    def is_local(self) -> bool:
        """Whether requests stay on this machine."""
        return urlsplit(self.base_url).hostname in ("localhost", "127.0.0.1", "::1")

    @property
    def is_encrypted(self) -> bool:
        return urlsplit(self.base_url).scheme == "https"

    def faults(self) -> Iterator[str]:
        yield from _address_faults(self.base_url)
        if self.key_variable is not None and not _VARIABLE.fullmatch(self.key_variable):
            yield (
                "key_variable is not the name of an environment variable (not shown: it may be the key itself). "
                "Put the key into a variable, and the variable's name here."
            )
        if not _HEADER_NAME.fullmatch(self.key_header):
            yield f"key_header is {self.key_header!r}: not the name of a header."
        yield from self._header_faults()

    def _header_faults(self) -> Iterator[str]:
        for name, value in self.headers.items():
            if looks_secret(name) or redact(line := f"{name}: {value}") != line:
                yield f"headers.{name} looks like a secret, which no configuration may hold. Use key_variable."
            elif not _HEADER_NAME.fullmatch(name) or not (value.isascii() and value.isprintable()):
                yield f"headers.{name} is not a header: expected a name without spaces and a value in plain ASCII."

    def preflight(self, context: BuildContext) -> Iterator[str]:
        limit_s = min(self.timeout_s, PREFLIGHT_TIMEOUT_S)
        hasty = replace(self, timeout_s=limit_s, total_timeout_s=2 * limit_s, retries=min(1, self.retries))
        try:
            client = hasty.build(context)
        except ConfigError as error:
            yield from error.faults
            return
        try:
            if (absence := client.absence()) is not None:
                yield (
                    f"base_url is {self.base_url}: no server answers there ({absence}). Start it, or correct the "
                    "address."
                )
        finally:
            client.close()

    def build(self, context: BuildContext) -> HTTPClient:
        """Make the client, not yet connected.

        Raises:
            ConfigError: the environment variable is not set, or its value cannot be a header.
        """
        from verl.http_client.client import HTTPClient  # imports httpx

        return HTTPClient(self, self._key())

    def _key(self) -> str | None:
        if self.key_variable is None:
            return None
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            name = self.key_variable
            raise ConfigError(f"key_variable is {name}: this environment variable is not set. export {name}=...")
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"key_variable is {self.key_variable}: its value has characters that are invalid in a header (not "
                "shown)."
            )
        return key


def _address_faults(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        port_is_wrong = parts.port == 0
    except ValueError as error:
        yield f"base_url is not an address ({error})."
        return
    if parts.username or parts.password:
        yield "base_url contains a user name or a password. Use key_variable."
    elif parts.query or parts.fragment:
        yield "base_url ends in a query or a fragment: give the address without it; a key belongs in key_variable."
    elif parts.scheme not in ("http", "https") or not parts.hostname or port_is_wrong or re.search(r"\s", url):
        yield f"base_url is {url!r}: expected an address such as http://localhost:8000/v1."
