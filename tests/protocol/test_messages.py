"""The whole message of each kind of fault that a batch can have; other tests ask for the field and the row."""

from __future__ import annotations

import pytest
import torch
from batches import rollout

from verl.errors import DataProtoValidationError
from verl.protocol import DataProto
from verl.protocol.fields import Field, register


def reward_fn(batch: DataProto = DataProto(), **fields: object) -> DataProto:  # noqa: B008 - it cannot be changed
    return batch.union(DataProto.from_dict(fields, producer=reward_fn))


def column(values: object) -> DataProto:
    return DataProto.from_dict(non_tensors={"answer": values}, producer=reward_fn)


SOURCE = f"reward_fn() at line {reward_fn.__code__.co_firstlineno} in test_messages.py"
ROLLOUT = f"rollout() at line {rollout.__code__.co_firstlineno} in batches.py"

CONTRACTS = {  # what was done, the field, what was expected, what was found, and the row where there is one
    "another type": (lambda: reward_fn(values=None), "values", "a torch.Tensor", "NoneType"),
    "another dtype": (lambda: reward_fn(responses=torch.zeros(2, 3)), "responses", "dtype int64", "dtype float32"),
    "other dims": (lambda: reward_fn(values=torch.zeros(5)), "values", "shape [B T]", "shape [5]"),
    "no rows": (lambda: reward_fn(x=torch.tensor(1)), "x", "a tensor whose first dim is B", "a tensor without dims"),
    "no column": (lambda: column("no"), "answer", "a list or an array with one entry per row", "str"),
    "no name": (
        lambda: DataProto.from_dict({3: torch.zeros(2)}, producer=reward_fn),  # type: ignore[dict-item]
        "3",
        "a text as the name of a field",
        "int",
    ),
    "another length": (
        lambda: reward_fn(rollout(4, 3, 5), advantages=torch.zeros(4, 6)),
        "advantages",
        f"shape [B T] = [4 5]; T = 5 was bound by `responses`, made by {ROLLOUT}",
        "shape [4, 6]",
    ),
    "another value": (
        lambda: reward_fn(rollout(4), prompt_ids=torch.zeros(4).long()),
        "prompt_ids",
        f"the values it has already: 100 at prompt_ids[0]; [4] int64 by {ROLLOUT}",
        f"other values: 0 at prompt_ids[0]; [4] int64 by {SOURCE}. To replace a field, pop it first.",
        0,
    ),
    "a part that lacks it": (
        lambda: DataProto.concat([reward_fn(x=torch.zeros(2)), reward_fn(y=torch.zeros(2))]),
        "x",
        "the same fields in every part of a concat",
        "missing in one of them",
    ),
    "a part of another shape": (
        lambda: DataProto.concat([reward_fn(x=torch.zeros(2)), reward_fn(x=torch.zeros(2, 1))]),
        "x",
        f"[2] float32 as in another part by {SOURCE}",
        "[2, 1] float32",
    ),
    "what is not finite": (
        lambda: reward_fn(x=torch.tensor([[0.0], [float("inf")]])).check(strict=True),
        "x",
        "finite numbers",
        "inf at [1, 0], 1 such of 2",
        1,
    ),
}


@pytest.mark.parametrize(
    ("fault", "field", "expected", "found", "row"), [(*case, None)[:5] for case in CONTRACTS.values()], ids=CONTRACTS
)
def test_a_field_that_breaks_its_contract(fault, field, expected, found, row):
    with pytest.raises(DataProtoValidationError) as refused:
        fault()
    lines = [f"Field `{field}` breaks its contract.", f"  Expected: {expected}", f"  Found: {found}"]
    lines += [] if row is None else [f"  First offending row: {row}"]
    assert str(refused.value).splitlines() == [*lines, f"  Source: {SOURCE}"]
    assert (refused.value.field, refused.value.row) == (field, row)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda: reward_fn(score=torch.zeros(2))["values"], "There is no `values` in this batch, which has: score."),
        (lambda: DataProto()["values"], "There is no `values` in this batch, which has: no fields."),
        (
            lambda: DataProto.concat([DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"t": t}) for t in (1, 2)]),
            "meta_info `t` is 1 in one batch of this concat and 2 in another: pop it from one of them.",
        ),
        (
            lambda: register(Field("values", ("B",), "int64")),
            "`values` is registered already, as [B T] float: choose another name.",
        ),
        (
            lambda: Field("x", ("T",), "float"),
            "dims of `x` are ('T',): expected B first, then different ones of P, T, S, N, L, K.",
        ),
        (
            lambda: rollout().batch.clear(),
            "The fields of a DataProto are read-only: add or replace them with data.union(DataProto.from_dict({...})), "
            "which checks them and returns a new batch; drop them with data.select(...) or data.pop(...).",
        ),
        (
            lambda: reward_fn(x=torch.zeros(1), y=torch.zeros(1)).rename("x", "y"),
            "rename of ['x'] to ['y']: expected one new name for each, different from the others of x, y.",
        ),
        (
            lambda: rollout(3).reorder([0, 0, 1]),
            "reorder needs each of the 3 rows once, got 3 indices. Use data[indices].",
        ),
        (lambda: rollout(3)[torch.tensor([True])], "A mask of shape [1] selects rows: expected [3]."),
        (lambda: rollout(3)[[0.5]], "Rows are selected by integers in one dim, not [1] torch.float32."),
    ],
)
def test_a_call_that_a_batch_does_not_take(fault, message):
    with pytest.raises(DataProtoValidationError) as refused:
        fault()
    assert str(refused.value) == message
