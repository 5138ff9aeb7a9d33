"""Configuration of a server: checks of its settings, and the key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from verl.component import PREFLIGHT_TIMEOUT_S, BuildContext, component
from verl.errors import ConfigError
from verl.http_client.request import EndpointSettings
from verl.utils.redact import looks_secret, redact

if TYPE_CHECKING:
    from verl.http_client.client import HTTPClient

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~\-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@component
class Endpoint(EndpointSettings):
    """An HTTP server. The API key is never part of a configuration, only the name of its environment variable."""

    example_values: ClassVar[Mapping[str, str]] = {"base_url": "http://localhost:8000"}

    def faults(self) -> Iterator[str]:
        yield from _address_faults(self.base_url)
        if self.key_variable is not None and not _VARIABLE.fullmatch(self.key_variable):
            yield (
                "key_variable is not the name of an environment variable (not shown: it may be the key itself). "
                "Put the key into a variable, and the variable's name here."
            )
        if not _HEADER_NAME.fullmatch(self.key_header):
            yield f"key_header is {self.key_header!r}: not the name of a header."
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
