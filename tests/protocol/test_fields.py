"""The table of fields and its checks."""

import pytest
import torch
from refusals import refusal, refused

from verl.errors import DataProtoValidationError
from verl.protocol import DataProto, fields
from verl.protocol.fields import FIELDS, Field, check_rows, check_tensor, register


@pytest.fixture
def own_field():
    """Register a field for one test alone."""
    added = []

    def add(field: Field) -> Field:
        added.append(field.name)
        return register(field)

    yield add
    for name in added:
        fields.TABLE.pop(name, None)


def bind(name: str, tensor, bound: dict) -> dict:
    check_tensor(name, tensor, bound, {})
    return bound


def test_every_registered_field_accepts_its_own_shape_and_binds_its_dims():
    sizes = {"B": 2, "P": 3, "T": 4, "S": 7, "N": 2, "L": 5, "K": 6}
    for field in FIELDS.values():
        tensor = torch.zeros([sizes[dim] for dim in field.dims], dtype=fields.DTYPES[field.dtype][0])
        bound = bind(field.name, tensor, {})
        assert bound == {dim: (sizes[dim], field.name) for dim in field.dims}


def test_every_registered_field_refuses_another_dtype_kind():
    for field in FIELDS.values():
        wrong = torch.float32 if field.dtype != "float" else torch.int64
        with refusal(field.name, kind=DataProtoValidationError):
            bind(field.name, torch.zeros([1] * len(field.dims), dtype=wrong), {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_float_field_accepts_any_floating_dtype(dtype):
    bind("values", torch.zeros(2, 3, dtype=dtype), {})


def test_s_must_be_p_plus_t_whichever_is_bound_last():
    parts = {
        "prompts": torch.zeros(2, 3, dtype=torch.int64),
        "responses": torch.zeros(2, 4, dtype=torch.int64),
        "input_ids": torch.zeros(2, 8, dtype=torch.int64),
    }
    orders = [
        ("prompts", "responses", "input_ids"),
        ("input_ids", "prompts", "responses"),
        ("input_ids", "responses", "prompts"),
    ]
    for order in orders:
        bound: dict = {}
        bind(order[0], parts[order[0]], bound)
        bind(order[1], parts[order[1]], bound)
        with refusal(order[2], kind=DataProtoValidationError):
            bind(order[2], parts[order[2]], bound)


def test_an_unregistered_field_needs_b_first_and_is_free_otherwise():
    bound = bind("hidden", torch.zeros(2, 5, 6, 7), {})
    assert bound == {"B": (2, "hidden")}


def test_a_field_of_ones_own_is_checked_and_padded_once_registered(own_field):
    own_field(Field("margins", ("B", "T"), "float", "reward", "how far ahead", "a reward", -1.5))
    with refusal("margins", kind=DataProtoValidationError):
        DataProto.from_dict({"margins": torch.zeros(2, 3, dtype=torch.int64)})
    short, long = (DataProto.from_dict({"margins": torch.zeros(1, t)}) for t in (1, 3))
    assert DataProto.concat([short, long])["margins"].tolist() == [[0.0, -1.5, -1.5], [0.0, 0.0, 0.0]]


def test_registering_the_same_field_twice_is_fine_and_another_contract_is_refused(own_field):
    own_field(Field("margins", ("B", "T"), "float"))
    register(Field("margins", ("B", "T"), "float"))
    with refusal("margins", kind=DataProtoValidationError):
        register(Field("margins", ("B",), "float"))


def described(**wrong):
    return lambda: Field(**{"name": "x", "dims": ("B",), "dtype": "float", **wrong})


test_what_is_no_field_or_not_of_its_kind_is_refused = refused(
    *(("x", dims, described(dims=dims)) for dims in (("T",), (), ("B", "X"), ("B", "T", "T"))),
    ("x", "float32", described(dtype="float32")),
    ("x", "eos", described(pad="eos")),
    ("responses", "int32", lambda: bind("responses", torch.zeros(2, 3, dtype=torch.int32), {})),
    ("values", [5], lambda: bind("values", torch.zeros(5), {})),
    ("temperature", "dims", lambda: bind("temperature", torch.tensor(1.0), {})),
    ("values", "column", lambda: check_rows("values", 2, {}, {})),
    ("values", "float", lambda: register(Field("values", ("B",), "float"))),
    kind=DataProtoValidationError,
)


def test_the_table_cannot_be_changed_but_by_registering():
    with pytest.raises(TypeError):
        FIELDS["x"] = Field("x", ("B",), "float")


def test_each_field_says_what_it_means_and_who_makes_it():
    assert all(field.meaning and field.producer for field in FIELDS.values())
