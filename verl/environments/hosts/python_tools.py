"""Functions as tools: JSON schemas from annotations, validated arguments, and results as text.

Also runs in the process of the tools, whose interpreter needs pydantic; imports nothing from verl.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python


class PythonTool:
    """A function that a model can call with JSON values as arguments.

    Args:
        function: function or coroutine function with annotated arguments; its docstring describes it, and its arguments
            in lines `name: text`.
        name: name by which the model calls it.
    Attributes:
        description: the first paragraph of the docstring.
        parameters: JSON schema of the arguments.
    Raises:
        TypeError: its name is missing or invalid, or an argument, which the error names, has no JSON type.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.name = name
        if function.__name__ != name:
            kind = "a lambda" if function.__name__ == "<lambda>" else f"the function {function.__name__!r}"
            raise TypeError(f"{name} is {kind}: write a tool as `def {name}(...)`")
        for argument, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise TypeError(f"{name} takes *{argument}: a tool names its arguments")
        document = inspect.getdoc(function) or ""
        self.description = document.split("\n\n")[0].replace("\n", " ").strip()
        try:
            adapter: TypeAdapter[Any] = TypeAdapter[Any](function)  # pyright: ignore[reportArgumentType]
            self.parameters = _without_titles(adapter.json_schema())
            self._call = validate_call(function)
        except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
            reason = str(error).split("\n\nFor further")[0].replace("\n", " ")
            raise TypeError(f"{name} has an argument without a JSON schema: {reason}") from error
        for line in document.splitlines():
            argument, colon, text = line.strip().partition(":")
            if colon and argument in self.parameters["properties"]:
                self.parameters["properties"][argument]["description"] = text.strip()
        del self.parameters["additionalProperties"]  # so it is of every function
        self.parameters = {"type": "object", "properties": {}, "required": []} | self.parameters

    def __call__(self, /, **arguments: Any) -> Any:
        """Call the function; returns its result `as_result`, or a coroutine for it.

        Raises:
            ValueError: an argument is missing, unknown or of the wrong type.
            TypeError: the result cannot be converted to text.
        """
        try:
            result = self._call(**arguments)
        except ValidationError as error:
            raise ValueError(self._fault(error)) from None
        return self._awaited(result) if inspect.isawaitable(result) else as_result(result)

    async def _awaited(self, result: Any) -> Any:
        try:
            return as_result(await result)
        except ValidationError as error:  # coroutine functions validate when they are awaited
            raise ValueError(self._fault(error)) from None

    def _fault(self, error: ValidationError) -> str:
        faults = [
            f"argument {'.'.join(map(str, fault['loc']))!r} of {self.name}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_context=False)
        ]
        return f"{'; '.join(faults)}. It takes {', '.join(self.parameters['properties']) or 'no arguments'}"


_VALUES = ("default", "const", "enum", "examples")  # of a schema: no schemas in them


def _without_titles(schema: Any) -> Any:
    """A schema without the titles that pydantic derives from names."""
    if isinstance(schema, Mapping):
        return {
            key: value if key in _VALUES else _without_titles(value)
            for key, value in schema.items()
            if key != "title" or not isinstance(value, str)
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


def _jsonable(value: Any) -> Any:
    """NumPy scalars and arrays, and tensors, as numbers and lists."""
    for method in ("tolist", "item"):
        if callable(getattr(value, method, None)):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__} is no text")


def as_result(value: Any) -> Any:
    """A tool's return value: unchanged if it is an image of Pillow or `{"type": "image", "image": ...}`, or a list with
    one; anything else as text."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    images = (x for x in values if hasattr(x, "getexif") or (isinstance(x, dict) and {"type", "image"} <= x.keys()))
    return as_text(value) if next(images, None) is None else value


def as_text(value: Any) -> str:
    """A tool's return value as text: text unchanged, anything else as JSON.

    Dates, decimals, sets, bytes, enums, dataclasses, pydantic models and NumPy values are converted. Characters that
    UTF-8 cannot encode become question marks.

    Raises:
        TypeError: it contains a value of another type.
    """
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode(errors="replace")
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)  # deterministic across processes
    try:
        text = value if isinstance(value, str) else _json(value)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise TypeError(f"the tool returned a {type(value).__name__} that cannot be written as JSON: {error}") from None
    return str(text).encode(errors="replace").decode()


def _json(value: Any) -> str:
    try:
        plain = to_jsonable_python(value, fallback=_jsonable)
    except (PydanticSerializationError, UnicodeDecodeError):  # bytes that are not UTF-8
        plain = to_jsonable_python(value, fallback=_jsonable, bytes_mode="base64")
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
