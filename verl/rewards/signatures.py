"""Adapters for reward functions with the arguments of verl and TRL.

own    f(prompts, responses, **columns), or per sample f(prompt, response, **columns)
verl   compute_score(data_source, solution_str, ground_truth, extra_info)    one response
TRL    f(completions, prompts, **columns)                                    a batch
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from verl.protocol.user_function import GIVEN, signature_of


def with_own_arguments(function: Callable, kwargs: dict[str, Any], per_sample: bool = False) -> Callable:
    """A function with our arguments that calls one of verl or TRL with `kwargs`; other functions unchanged."""
    if (convention := signature_of(function).convention) is None:
        return function
    (signature := inspect.signature(function)).bind_partial(**kwargs)  # else a TypeError
    takes_any = any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values())

    @functools.wraps(function)
    def own(**given: Any) -> Any:
        table = {name: [x] if per_sample else x for name, x in given.items() if name not in kwargs}
        prompts, responses = (table.pop(name if per_sample else f"{name}s") for name in ("prompt", "response"))
        none = [None] * len(responses)
        if convention == "trl":  # chats get messages
            chats = table.get("prompt_messages", none)
            turns = [y if x is None else [{"role": "assistant", "content": y}] for x, y in zip(chats, responses)]
            table |= {"prompts": [x or y for x, y in zip(chats, prompts)], "completions": turns}
            return function(**{x: table[x] for x in table if takes_any or x in signature.parameters} | kwargs)
        table = {"data_source": none, "extra_info": none, **table, "solution_str": responses}
        used = [x for x in (*GIVEN, "ground_truth") if x in table and x in signature.parameters]
        scores = [function(**dict(zip(used, row)) | kwargs) for row in zip(*(table[x] for x in used))]
        return scores[0] if per_sample else scores

    return own
