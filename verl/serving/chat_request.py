"""The body of a request, as one of chat completions: parsed within limits, with the types of its fields checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from verl.serving.conversations import KnownConversations

IGNORED = {
    "user", "metadata", "store", "parallel_tool_calls", "stream_options", "service_tier", "safety_identifier",
    "prompt_cache_key", "cache_control",
}  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # values under which a field changes nothing
    "top_logprobs": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "text": ({"format": {"type": "text"}},), "truncation": ("disabled",),
    "background": (False,), "include": ([], ["reasoning.encrypted_content"]), "thinking": ({"type": "disabled"},),
}  # fmt: skip
MOST_FAULTS = 3  # of the types of a body, in one message


class Refused(Exception):
    """A request that is refused.

    Args:
        status: of HTTP.
        param: the field that is at fault, if one is.
        code: for clients, such as `model_not_found`.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def not_understood(field: str, value: Any) -> Refused:
    """The refusal of a part of a field."""
    return Refused(400, f"{field} has {repr(value)[:80]}: this endpoint does not understand it", field)


class _Typed(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _TextPart(_Typed):
    type: Literal["text"]
    text: str


class _ImageURL(_Typed):
    url: str
    detail: Literal["auto", "high"] | None = None


class _ImagePart(_Typed):
    type: Literal["image_url"]
    image_url: _ImageURL


class _FunctionCall(_Typed):
    name: str
    arguments: str


class _ToolCall(_Typed):
    id: str | None = None
    function: _FunctionCall


class _Message(_Typed):
    role: str
    content: str | list[Annotated[_TextPart | _ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Parameters(_Typed):
    properties: dict[str, Any] | None = None


class _Function(_Typed):
    name: str
    description: str | None = None
    parameters: _Parameters | None = None


class _Tool(_Typed):
    type: Literal["function"] = "function"
    function: _Function


_StopText = Annotated[str, Field(min_length=1, max_length=256)]


class _ChatRequest(_Typed):
    model: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    tool_choice: Literal["auto", "none"] | None = None
    stop: _StopText | Annotated[list[_StopText], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None


FIELDS = frozenset(_ChatRequest.model_fields)


def parse_request(
    content: bytes, api: Any, known: KnownConversations, sampling: Mapping[str, float], ignores_sampling: bool
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Parse the body of a request.

    Args:
        content: JSON. Nesting deeper than about 200 levels, and surrogates without a partner, are refused.
        api: module that translates: FIELDS that it understands, and `chat_body`.
        sampling: temperature and top_p of the rollout.
        ignores_sampling: accept other values of these, which have no effect then.
    Returns:
        The body, and the translated one, with fields of the types of `_ChatRequest`.
    Raises:
        Refused: the body is not JSON, a field has another type, or it would change the distribution of the policy.
    """
    try:
        body = pydantic_core.from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise Refused(400, f"the body is a JSON {type(body).__name__}: expected an object")
    _refuse_fields(body, api.FIELDS, sampling, ignores_sampling)
    try:
        chat = api.chat_body(body, known)
        _ChatRequest.model_validate(chat)
    except (AttributeError, TypeError) as error:
        raise Refused(400, f"a field has another type ({error})") from error
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        reasons = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults[:MOST_FAULTS])
        raise Refused(400, reasons, str(faults[0]["loc"][0])) from error
    return body, chat


def _refuse_fields(
    body: Mapping[str, Any], fields: Collection[str], sampling: Mapping[str, float], ignores_sampling: bool
) -> None:
    for name, value in body.items():
        if value is None or name in fields or name in IGNORED:
            continue
        field, shown = name[:80], repr(value)[:80]
        if name in sampling:
            if value != sampling[name] and not ignores_sampling:
                raise Refused(
                    400,
                    f"{field} is {shown}: the policy is sampled with {name} {sampling[name]:g}, as it is trained. "
                    "Leave it out, or serve with --ignore-sampling.",
                    field,
                )
        elif value not in NEUTRAL.get(name, ()):
            raise Refused(400, f"{field} is {shown}: this endpoint does not understand it", field)
