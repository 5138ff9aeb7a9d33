"""Arguments of reward functions, by the signature that a function has.

own    f(prompts, responses, **columns)                                      a batch
verl   compute_score(data_source, solution_str, ground_truth, extra_info)    one response
TRL    f(completions, prompts, **columns)                                    a batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


def arguments_of(
    convention: str | None, prompts: list[str], responses: list[str], columns: Mapping[str, list]
) -> dict[str, list]:
    """The keyword arguments of a batch, B items each.

    Args:
        convention: of `Signature`.
        columns: of the data. `ground_truth` is that column, or that of `reward_model`, or `answer`.
    """
    none: list[Any] = [None] * len(responses)
    if convention == "trl":  # chats get messages
        chats = columns.get("prompt_messages", none)
        turns = [y if x is None else [{"role": "assistant", "content": y}] for x, y in zip(chats, responses)]
        return {**columns, "prompts": [x or y for x, y in zip(chats, prompts)], "completions": turns}
    if convention is None:
        return {"prompts": prompts, "responses": responses, **columns}
    given = {"data_source": none, "extra_info": none, **columns, "solution_str": responses}
    if "ground_truth" not in columns and "reward_model" in columns:
        given["ground_truth"] = [(x or {}).get("ground_truth") for x in columns["reward_model"]]
    elif "ground_truth" not in columns and "answer" in columns:
        given["ground_truth"] = columns["answer"]
    return {name: x for name, x in given.items() if name in VERL}


def called(function: Callable, given: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a function with keyword arguments, or a whole batch; one of a single response for each response."""
    if not isinstance(given, dict):
        return function(given, **kwargs)
    if isinstance(given.get("solution_str"), list):
        return [function(**{**dict(zip(given, row)), **kwargs}) for row in zip(*given.values())]
    return function(**{**given, **kwargs})
