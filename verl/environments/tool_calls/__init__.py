"""Tool calls in the text of a model.

parse       Parser of the calls in a turn, for each format: `parse_calls`, `ToolCall`, `ParseFault`
arguments   Parsers of arguments: typed by a schema, Python literals, Gemma's notation
round_trip  Detection of a chat template's format, verified by rendering calls and parsing them back
"""

from verl.environments.tool_calls.parse import ParseFault, ToolCall, ToolFormat, parse_calls

__all__ = ["ParseFault", "ToolCall", "ToolFormat", "parse_calls"]
