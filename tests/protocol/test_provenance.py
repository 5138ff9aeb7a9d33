"""An error names the function that produced a field, whatever kind of callable it is."""

import functools
import linecache
import pickle
from pathlib import Path

import pytest
import torch

from verl.errors import DataProtoValidationError
from verl.protocol import DataProto
from verl.protocol.provenance import Source, contract_error, source_of, source_of_caller


def line_of(text: str) -> int:
    """The line of this file that opens with `text`, indentation aside."""
    lines = Path(__file__).read_text().splitlines()
    return next(place for place, line in enumerate(lines, start=1) if line.strip().startswith(text))


def reward_fn():
    return DataProto.from_dict({"token_level_scores": None})


def logged(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def twice(function):
    return function


@twice
@twice
def decorated_fn():
    return source_of_caller(0)


@logged
def wrapped_fn():
    return source_of_caller(0)


class CallableReward:
    def __call__(self):
        return source_of_caller(0)

    def method_reward(self):
        return source_of_caller(0)


class ModuleReward(torch.nn.Module):
    def forward(self):
        return source_of_caller(0)


def test_the_function_that_called_from_dict_is_named_by_name_line_and_file():
    with pytest.raises(DataProtoValidationError) as caught:
        reward_fn()
    assert str(caught.value).endswith(f"Source: reward_fn() at line {line_of('def reward_fn')} in test_provenance.py")


@pytest.mark.parametrize(
    ("producer", "expected"),
    [
        (reward_fn, "reward_fn() at line {def reward_fn}"),
        (functools.partial(functools.partial(reward_fn)), "reward_fn() at line {def reward_fn}"),
        (decorated_fn, "decorated_fn() at line {def decorated_fn}"),
        (wrapped_fn, "wrapped_fn() at line {def wrapped_fn}"),
        (functools.lru_cache(reward_fn), "reward_fn() at line {def reward_fn}"),
        (CallableReward(), "CallableReward.__call__() at line {def __call__}"),
        (CallableReward().method_reward, "CallableReward.method_reward() at line {def method_reward}"),
        (functools.partial(CallableReward()), "CallableReward.__call__() at line {def __call__}"),
        (CallableReward, "CallableReward() at line {class CallableReward}"),
        (ModuleReward(), "ModuleReward.forward() at line {def forward}"),
    ],
)
def test_every_kind_of_callable_is_traced_to_its_definition(producer, expected):
    text, _, rest = expected.partition("{")
    assert str(source_of(producer)) == f"{text}{line_of(rest.rstrip('}'))} in test_provenance.py"


@pytest.mark.parametrize("producer", [sum, len, torch.zeros, torch.add, dict, functools.partial(print), {}.get])
def test_a_callable_without_python_source_is_named_all_the_same(producer):
    name = getattr(getattr(producer, "func", producer), "__name__")  # noqa: B009
    text = str(source_of(producer))
    assert text.startswith(f"{name}() in ")
    assert "line" not in text


def test_a_source_survives_pickling_and_a_file_that_is_gone():
    source = pickle.loads(pickle.dumps(source_of(decorated_fn)))
    assert source == source_of(decorated_fn)
    linecache.clearcache()
    assert str(Source("gone_fn", 7, "/nowhere/gone.py")) == "gone_fn() at line 7 in gone.py"


def test_the_error_has_one_line_for_each_fact_and_leaves_out_what_is_unknown():
    full = contract_error("values", "shape [B T]", "shape [3]", Source("f", 2, "/x/y.py"), row=1)
    assert str(full).splitlines() == [
        "Field `values` breaks its contract.",
        "  Expected: shape [B T]",
        "  Found: shape [3]",
        "  First offending row: 1",
        "  Source: f() at line 2 in y.py",
    ]
    assert len(str(contract_error("values", "a", "b", None)).splitlines()) == 3
