"""Tool calls in the text of a model.

parse       The calls in a turn, for each format: `parse_calls`, `ToolCall`, `ParseFault`
arguments   Texts of arguments as JSON values: typed by a schema, as Python literals, as Gemma writes them
round_trip  The format that a chat template writes, proven by rendering calls and parsing them back
"""

from verl.environments.tool_calls.parse import ParseFault, ToolCall, ToolFormat, parse_calls

__all__ = ["ParseFault", "ToolCall", "ToolFormat", "parse_calls"]
