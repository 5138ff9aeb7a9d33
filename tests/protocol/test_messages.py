"""Each kind of fault that a batch can have, by field and row, and who made the field."""

import numpy as np
import pytest
import torch
from batches import rollout
from refusals import refused

from verl.errors import DataProtoValidationError
from verl.protocol import DataProto
from verl.protocol.fields import Field, register


def reward_fn(batch: DataProto = DataProto(), **fields: object) -> DataProto:  # noqa: B008 - it cannot be changed
    return batch.union(DataProto.from_dict(fields, producer=reward_fn))


def column(values: object) -> DataProto:
    return DataProto.from_dict(non_tensors={"answer": values}, producer=reward_fn)


def facts(t):
    return DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"t": t})


LOOKS = (
    lambda data: data["returns"], lambda data: data.batch["returns"], lambda data: data.select(["returns"]),
    lambda data: data.pop(["returns"]),
)  # fmt: skip
INFINITE = torch.tensor([[0.0], [float("inf")]])
test_what_breaks_a_contract_is_told_with_field_row_expectation_and_producer = refused(
    ("values", "NoneType", lambda: reward_fn(values=None)),
    ("values", "list", lambda: reward_fn(values=[0.0])),
    ("values", "ndarray", lambda: reward_fn(values=np.zeros((2, 3)))),
    ("responses", "float32", lambda: reward_fn(responses=torch.zeros(2, 3))),
    ("values", [5], lambda: reward_fn(values=torch.zeros(5))),
    ("x", "dims", lambda: reward_fn(x=torch.tensor(1))),
    ("x", "column", lambda: DataProto.from_dict({"x": torch.zeros(2)}, {"x": [1, 2]})),
    ("answer", "str", lambda: column("no")),
    ("values", "tensor", lambda: DataProto.from_dict(non_tensors={"values": [1, 2]})),
    ("3", "int", lambda: DataProto.from_dict({3: torch.zeros(2)}, producer=reward_fn)),  # type: ignore[dict-item]
    ("advantages", [4, 6], lambda: reward_fn(rollout(4, 3, 5), advantages=torch.zeros(4, 6))),
    ("answer", 3, lambda: rollout(4).select(non_tensor_batch_keys=[]).union(column([1, 2, 3]))),
    (("prompt_ids", 0), 100, lambda: reward_fn(rollout(4), prompt_ids=torch.zeros(4).long())),
    ("x", "missing", lambda: DataProto.concat([reward_fn(x=torch.zeros(2)), reward_fn(y=torch.zeros(2))])),
    ("x", [2, 1], lambda: DataProto.concat([reward_fn(x=torch.zeros(2)), reward_fn(x=torch.zeros(2, 1))])),
    (("x", 1), "inf", lambda: reward_fn(x=INFINITE).check(strict=True)),
    ("values", "score", lambda: reward_fn(score=torch.zeros(2))["values"]),
    *(("returns", "values", lambda look=look: look(rollout(1).select(["values"], []))) for look in LOOKS),
    ((), 2, lambda: DataProto.concat([facts(1), facts(2)])),
    ((), 2, lambda: facts(1).union(facts(2))),
    ("values", "float", lambda: register(Field("values", ("B",), "int64"))),
    ("x", "T", lambda: Field("x", ("T",), "float")),
    ((), "read-only", lambda: rollout().batch.clear()),
    ((), [1], lambda: rollout(3)[torch.tensor([True])]),
    ((), "torch.float32", lambda: rollout(3)[[0.5]]),
    kind=DataProtoValidationError,
)


def test_a_fault_names_the_line_of_the_producer_and_of_what_bound_a_length():
    with pytest.raises(DataProtoValidationError) as caught:
        reward_fn(rollout(4, 3, 5), advantages=torch.zeros(4, 6))
    for maker, file in ((reward_fn, "test_messages.py"), (rollout, "batches.py")):
        line = f"{maker.__name__}() at line {maker.__code__.co_firstlineno} in {file}"
        assert line in str(caught.value)
