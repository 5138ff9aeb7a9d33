"""DataProto: what it accepts and refuses, and how fields join."""

import copy

import numpy as np
import pytest
import torch
from batches import assert_same, rollout
from refusals import refusal

from verl import config
from verl.errors import DataProtoValidationError
from verl.protocol import DataProto, data_proto


def test_columns_of_nested_lists_stay_one_object_per_row():
    data = DataProto.from_dict(non_tensors={"turns": [[1, 2], [3, 4]], "grid": np.arange(6).reshape(2, 3)})
    assert data["turns"].shape == data["grid"].shape == (2,)
    assert data["turns"][1] == [3, 4]
    assert data["grid"][1] == [3, 4, 5]


def reward_returning(value):
    return DataProto.from_dict({"token_level_scores": value})


def test_a_tensor_changed_behind_the_batchs_back_is_found_at_the_union():
    other = DataProto.from_dict({"advantages": torch.zeros(4, 5)})
    other["advantages"].resize_(4, 6)
    with refusal("advantages", kind=DataProtoValidationError):
        rollout(4, 3, 5).union(other)


CHANGES = {
    "set": lambda data: data.batch.__setitem__("values", torch.zeros(4, 5)),
    "set on the batch": lambda data: data.__setitem__("values", torch.zeros(4, 5)),
    "delete": lambda data: data.non_tensor_batch.__delitem__("answer"),
    "or": lambda data: data.batch.__ior__({"x": torch.zeros(4)}),
    "update": lambda data: data.batch.update({"x": torch.zeros(4)}),
    "pop": lambda data: data.batch.pop("values"),
    "popitem": lambda data: data.batch.popitem(),
    "setdefault": lambda data: data.batch.setdefault("x", None),
    "clear": lambda data: data.batch.clear(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_fields_refuse_every_change_and_point_to_union(change):
    data = rollout()
    with refusal(kind=DataProtoValidationError):
        change(data)
    assert_same(data, rollout())


def test_rows_outside_the_batch_are_refused():
    for key in (3, -4, [0, 3], torch.tensor([-4])):
        with pytest.raises(IndexError, match="of a batch of 3 rows"):
            rollout(3)[key]


def test_one_row_is_a_batch_of_one_and_iterating_gives_the_rows():
    data = rollout(3)
    assert_same(DataProto.concat(list(data)), data)  # type: ignore[arg-type]
    assert_same(data[-1], data[2:3])
    assert_same(data[torch.tensor(1)], data[[1]])


def test_union_changes_neither_side_and_keeps_both_producers():
    left = DataProto.from_dict({"values": torch.zeros(2, 3)}, meta_info={"a": 1}, producer=reward_returning)
    right = DataProto.from_dict({"returns": torch.ones(2, 3)}, {"answer": ["x", "y"]}, {"b": 2})
    both = left.union(right)
    assert set(both.batch) == {"values", "returns"}
    assert "answer" in both
    assert both.meta_info == {"a": 1, "b": 2}
    assert list(left.batch) == ["values"]
    assert list(right.batch) == ["returns"]
    assert left.meta_info == {"a": 1}
    assert both.producer("values").function == "reward_returning"
    assert both.producer("answer").function.startswith("test_union")


def test_a_union_of_several_is_that_of_each_in_turn_and_looks_at_every_number_once(monkeypatch):
    monkeypatch.setattr(config, "strict_data_check", True)
    looked: list[str] = []
    whole = data_proto.check_content

    def counted(batch, bound, sources, new=None, ragged=None):
        looked.extend(batch if new is None else new)
        whole(batch, bound, sources, new, ragged or {})

    base = rollout(4, 3, 5)
    others = [
        DataProto.from_dict(
            {name: torch.zeros(4, 5)}, {f"of_{name}": list("abcd")}, {name: 1}, producer=reward_returning
        )
        for name in ("alpha", "beta", "gamma")
    ]
    monkeypatch.setattr(data_proto, "check_content", counted)
    together = base.union(*others)
    assert sorted(looked) == ["alpha", "beta", "gamma"]
    in_turn = base.union(others[0]).union(others[1]).union(others[2])
    assert_same(together, in_turn)
    assert together.meta_info == in_turn.meta_info
    assert together.producer("of_beta") == in_turn.producer("of_beta")
    again = DataProto.from_dict({"alpha": torch.ones(4, 5)}, producer=rollout)
    with refusal("alpha", 0, kind=DataProtoValidationError):
        base.union(*others, again)
    with refusal("advantages", kind=DataProtoValidationError):
        base.union(others[0], DataProto.from_dict({"advantages": torch.zeros(4, 6)}))


def test_a_length_learnt_in_one_union_does_not_bind_the_batch_it_came_from():
    base = DataProto.from_dict({"prompt_ids": torch.zeros(2).long()})
    for t in (3, 4):
        assert base.union(DataProto.from_dict({"values": torch.zeros(2, t)}))["values"].shape == (2, t)


def test_equal_values_may_meet_and_other_values_name_both_producers():
    base = DataProto.from_dict(
        {"values": torch.tensor([[1.0, float("nan")]])}, {"answer": ["a"]}, producer=reward_returning
    )
    base.union(DataProto.from_dict({"values": torch.tensor([[1.0, float("nan")]])}, {"answer": ["a"]}))
    different = [
        DataProto.from_dict({"values": torch.tensor([[1.0, 2.0]])}, producer=rollout),
        DataProto.from_dict({"values": torch.tensor([[1.0]])}, producer=rollout),
        DataProto.from_dict({"values": torch.tensor([[1.0, float("nan")]]).double()}, producer=rollout),
        DataProto.from_dict({"answer": torch.zeros(1)}, producer=rollout),
        DataProto.from_dict(non_tensors={"answer": ["b"]}, producer=rollout),
    ]
    for other in different:
        name, row = [*other.batch, *other.non_tensor_batch][0], [0] * (other is different[0] or other is different[-1])
        with refusal(name, *row, value="reward_returning()", kind=DataProtoValidationError):
            base.union(other)


def test_facts_of_arrays_that_are_equal_may_meet():
    array = {"t": np.array([1, 2]), "u": torch.ones(2), "v": [float("nan")]}
    both = DataProto.from_dict(meta_info=array).union(DataProto.from_dict(meta_info=copy.deepcopy(array)))
    assert both.meta_info.keys() == array.keys()


def test_select_and_pop_move_fields_with_their_producers():
    data = rollout()
    chosen = data.select(["values", "prompts"], [], [])
    assert list(chosen.batch) == ["prompts", "values"]
    assert not chosen.non_tensor_batch
    assert not chosen.meta_info
    popped = data.pop(["values"], ["answer"], ["step"])
    assert "values" not in data
    assert "answer" not in data
    assert data.meta_info == {}
    assert len(data) == 4
    assert list(popped.batch) == ["values"]
    assert popped.meta_info == {"step": 3}
    assert_same(
        data.union(popped).select(list(data.batch), []),
        data.select(meta_info_keys=[]).union(DataProto.from_dict(meta_info={"step": 3})),
    )


def test_dims_are_free_again_when_the_fields_that_bound_them_are_gone():
    data = rollout(4, 3, 5).select(["prompts", "prompt_ids"], [])
    assert data.union(DataProto.from_dict({"responses": torch.zeros(4, 9).long()}))["responses"].shape == (4, 9)


def test_the_strict_setting_checks_content_where_batches_are_made_and_joined(monkeypatch):
    bad = torch.full((4, 5), float("nan"))
    data, other = rollout(), DataProto.from_dict({"returns": bad})
    data.union(other)
    monkeypatch.setattr(config, "strict_data_check", True)
    for act in (lambda: data.union(other), lambda: DataProto.from_dict({"returns": bad}), other.check):
        with refusal("returns", 0, kind=DataProtoValidationError):
            act()
    data.check()
