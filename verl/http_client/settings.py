"""Settings of a server: address, limits, time-outs and retries."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt

from verl.component import Description, component


@component
class EndpointSettings(Description):
    """Settings of `Endpoint`.

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
