"""Keep secrets out of what is printed, logged and saved: secret environment variables, keys, URLs and headers."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from verl.errors import OutputFailed

MASK = "***"
MIN_ENV_LENGTH = 8  # a shorter value, such as "1" or "debug", would mask ordinary text


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALWAYS = _names(
    "password passwords passwd passphrase secret secrets credential credentials apikey apikeys accesskey secretkey "
    "privatekey authtoken signature"
)
_KEY_OWNERS = _names(
    "api access secret private auth encryption signing account shared ssh master service license deploy wandb openai "
    "anthropic hf huggingface azure aws gcp google oss s3"
)
_TOKEN_OWNERS = _names("api access auth refresh bearer session security hub hf github gitlab wandb slack")
_VOCABULARY = _names(
    "pad eos bos unk mask sep cls special stop image video audio max min num per next last first new begin end start "
    "total think prompt response additional each every bad single one a the this of"
)
_LOCATION_WORDS = _names("path file dir folder name type length size count index")
_QUERY_ONLY = frozenset(("key", "sig", "awsaccesskeyid", "googleaccessid", "ossaccesskeyid"))

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NAME = re.compile(r"""(?<![\w.\-])(?P<name>[A-Za-z_][\w.\-]*)(?P<sign>["']?\s*[=:]\s*)(?P<quote>["']?)""")
_VALUE = re.compile(r"""[^\s"',;&}\])]+""")
_QUERY = re.compile(r"(?P<head>[?&;](?P<name>[\w.\-]+)=)(?P<value>[^\s&;\"'<>#]+)")
_URL_PASSWORD = re.compile(r"(?<![\w+.\-])(?P<head>[A-Za-z][\w+.\-]*://[^\s/:@\"']*):[^\s/\"'<>]+@")
_URL_TOKEN = re.compile(r"(?<![\w+.\-])(?P<head>https?://)[^\s/:@\"']{16,}@", re.IGNORECASE)
# A part of a web address that only a generator writes, such as that of a webhook: 20 characters and more, with digits.
_URL_PART = re.compile(
    r"(?P<head>\bhttps?://[^\s\"'<>?#]*?/)(?P<part>(?=[\w:=+~-]*\d)(?=[\w:=+~-]*[A-Za-z])[\w:=+~-]{20,})"
)
_HEADER = re.compile(
    r"""(?P<head>\b(?:proxy-)?authorization["']?\s*[:=]\s*["']?)(?P<value>(?:[A-Za-z]+[ ]+)?[^\s"',]+)""", re.IGNORECASE
)
_BEARER = re.compile(r"(?P<head>\bbearer\s+)(?=[\w.~+/=\-]*\d|[\w.~+/=\-]{20})[\w.~+/=\-]{8,}", re.IGNORECASE)
_PEM = re.compile(r"-----BEGIN (?P<kind>[A-Z ]*PRIVATE KEY)-----.*?(?:-----END (?P=kind)-----|\Z)", re.DOTALL)
_SHAPES = re.compile(
    r"""(?<![\w\-])(?:
      sk-(?=[\w\-]*\d)[\w\-]{16,}           # OpenAI, Anthropic and their like
    | hf_[A-Za-z0-9]{16,}                   # Hugging Face
    | (?:AKIA|ASIA)[0-9A-Z]{16}             # AWS
    | gh[opusr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w\-]{16,}
    | xox[abeprs]-[\w\-]{10,}               # Slack
    | AIza[\w\-]{30,} | ya29\.[\w\-]{20,}   # Google
    | nvapi-[\w\-]{20,} | wandb_v\d_\w{20,}
    | eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*    # JSON web token
    )""",
    re.VERBOSE,
)


def looks_secret(name: str) -> bool:
    """Whether a config key of this name holds a secret: api_key and hub.token do, answer_key does not."""
    words = _words(name)
    before, last = ("", "", *words)[-2:]
    if last in _LOCATION_WORDS:
        return False
    if _ALWAYS.intersection(words) or (last == "pwd" and before):
        return True
    if last == "token":
        return before not in _VOCABULARY
    if last == "tokens":
        return before in _TOKEN_OWNERS
    return any(owner in _KEY_OWNERS and word in ("key", "keys") for owner, word in itertools.pairwise(words))


def redact(text: str) -> str:
    """The text with every secret in it replaced by `***`. Applying it twice changes nothing more."""
    return _redact(text, _environment_secrets())


def redact_tree(obj: Any) -> Any:
    """A copy of nested dicts, lists and tuples without secrets; other objects are returned unchanged.

    Below a key that looks secret every text is masked, and below one that names a password every number too.
    """
    return _redact_tree(obj, _environment_secrets())


class RedactSecrets(logging.Filter):
    """Logging filter that redacts message, traceback and stack of every record; it lets all records pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # arguments that do not fit their format
            message = f"{record.msg} {record.args}"
        record.msg, record.args = redact(message), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        return True


class RedactedOutput:
    """A text stream that redacts what is written, for code of others that prints, such as a reward.

    Attributes:
        may_fail: what cannot be written is dropped. Otherwise `OutputFailed` is raised.
    """

    def __init__(self, stream: TextIO, may_fail: bool):
        self._stream, self.may_fail = stream, may_fail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(self._stream.write, redact(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, operation: Callable[..., object], *args: str) -> None:
        try:
            operation(*args)
        except OSError as error:
            if self.may_fail:
                return
            if isinstance(error, BrokenPipeError):  # as `head` leaves it
                raise
            raise OutputFailed(f"standard output cannot be written: {error.strerror}") from error

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def redact_output(may_fail: bool = False) -> None:
    """Redact the standard output and error of this process from here on. Idempotent.

    Streams that are closed become the null device, because the next file that is opened would get their number, and
    with it what any process of this run prints.

    Args:
        may_fail: standard output may be lost, as that of a run; standard error always may.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
        stream = getattr(sys, name)
        if number and stream is not None and not isinstance(stream, RedactedOutput):
            stream = RedactedOutput(stream, name == "stderr")
            setattr(sys, name, stream)
        if may_fail and number and stream is not None:
            stream.may_fail = True


@functools.lru_cache(maxsize=4096)
def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORDS.findall(name.rsplit(".", 1)[-1]))


def _environment_secrets() -> list[str]:
    """Values to mask, longest first, so that a value containing another one goes whole."""
    values = set()
    for name, value in os.environ.items():
        words = _words(name)
        if len(value := value.strip()) < MIN_ENV_LENGTH or not words or words[-1] in _LOCATION_WORDS:
            continue
        if looks_secret(name) or "key" in words or "keys" in words or "token" in words:
            values |= {value, quote(value, safe="")}
    return sorted(values, key=lambda value: (-len(value), value))


def _redact(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, MASK)
    text = _PEM.sub(MASK, text)
    text = _URL_PASSWORD.sub(rf"\g<head>:{MASK}@", text)
    text = _URL_TOKEN.sub(rf"\g<head>{MASK}@", text)
    while (masked := _URL_PART.sub(rf"\g<head>{MASK}", text)) != text:  # one part of each address at a time
        text = masked
    text = _QUERY.sub(_mask_query, text)
    text = _HEADER.sub(rf"\g<head>{MASK}", text)
    text = _BEARER.sub(rf"\g<head>{MASK}", text)
    text = _SHAPES.sub(MASK, text)
    return _redact_assignments(text)


def _mask_query(match: re.Match[str]) -> str:
    secret = match["name"].lower() in _QUERY_ONLY or looks_secret(match["name"])
    return match["head"] + (MASK if secret else match["value"])


def _redact_assignments(text: str) -> str:
    """Mask the value in `name=value`, `name: value` and `"name": "value"`."""
    pieces, done = [], 0
    for match in _NAME.finditer(text):
        if match.start() < done or not looks_secret(match["name"]):
            continue
        value = _VALUE.match(text, match.end())
        if value is not None and _could_be_secret(match, value[0]):
            pieces += [text[done : match.end()], MASK]
            done = value.end()
    return "".join([*pieces, text[done:]])


def _could_be_secret(match: re.Match[str], value: str) -> bool:
    """A password may be anything; a key or token is long, and in prose, as in `token: unexpected`, it has a digit."""
    words = _words(match["name"])
    if value.startswith("//"):
        return False
    if _ALWAYS.intersection(words):
        return True
    if len(value) < MIN_ENV_LENGTH or value.isdigit():
        return False
    prose = len(words) == 1 and not match["quote"] and "=" not in match["sign"]
    return not prose or any(character.isdigit() for character in value)


def _redact_tree(obj: Any, secrets: list[str], under: str = "") -> Any:
    if isinstance(obj, Mapping):
        return {
            _redact(key, secrets) if isinstance(key, str) else key: _redact_tree(
                item, secrets, key if isinstance(key, str) and looks_secret(key) else under
            )
            for key, item in obj.items()
        }
    if isinstance(obj, list) or type(obj) is tuple:
        return type(obj)(_redact_tree(item, secrets, under) for item in obj)
    if isinstance(obj, (str, Path)):
        if under and str(obj):
            return MASK
        redacted = _redact(str(obj), secrets)
        return obj if redacted == str(obj) else redacted
    number = isinstance(obj, (int, float)) and not isinstance(obj, bool)
    return MASK if number and _ALWAYS.intersection(_words(under)) else obj
