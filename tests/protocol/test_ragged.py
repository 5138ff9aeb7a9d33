"""A ragged field is a list of tensors, one for each row, whatever its items share and in whatever order they lie."""

import torch
from any_batches import exact, ragged_rows, rows_of
from batches import rollout
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from verl.cluster.shm_channel import serialize
from verl.errors import DataProtoValidationError
from verl.protocol import DataProto
from verl.protocol.ragged import Ragged

many = settings(deadline=None, max_examples=60)


def same(field: Ragged, rows: list[torch.Tensor]) -> None:
    assert field.fault() is None
    assert field.lengths.tolist() == [len(row) for row in rows]
    assert [exact(x) for x in rows_of(field)] == [exact(x) for x in rows]


def batch(rows: list[torch.Tensor], **columns: list) -> DataProto:
    return DataProto.from_dict(non_tensors=columns, ragged={"media.x": Ragged.of(rows)})


@many
@given(st.data())
def test_rows_that_are_taken_joined_and_compacted_are_those_of_the_list(draw):
    rows = draw.draw(ragged_rows(5))
    others = [row.clone() for row in draw.draw(st.permutations(rows))]
    taken = draw.draw(st.lists(st.integers(0, 4), max_size=7))
    field, other = Ragged.of(rows), Ragged.of(others)
    same(field.take(torch.tensor(taken, dtype=torch.int64)), [rows[row] for row in taken])
    part = field.take(slice(1, 3))
    same(part, rows[1:3])
    same(Ragged.concat([part, other, field, part]), [*rows[1:3], *others, *rows, *rows[1:3]])
    lean = part.compact()
    same(lean, rows[1:3])
    assert sorted(set(lean.index.tolist())) == list(range(len(lean.offsets) - 1))
    differing = next((n for n, (x, y) in enumerate(zip(rows, others)) if exact(x) != exact(y)), None)
    if not rows[0].is_floating_point():  # -0.0 and 0.0 are other bytes
        assert field.first_difference(other) == differing
    assert field.first_difference(Ragged.of([row.clone() for row in rows])) is None


def test_responses_to_a_prompt_share_its_images_and_parts_of_a_batch_share_the_values():
    rows = [torch.ones(3, 2), torch.zeros(0, 2), torch.full((1, 2), 7.0)]
    data = batch(rows, answer=["a", "b", "c"]).repeat(4)
    assert data["media.x"].values.shape == (4, 2)
    joined = DataProto.concat(data.chunk(3))
    assert joined["media.x"].values is data["media.x"].values
    same(joined["media.x"], [row for row in rows for _ in range(4)])


def test_what_is_sent_and_joined_holds_no_image_without_a_row():
    """Else a group that is kept for a later step would keep the images of its whole batch."""
    rows = [torch.full((1000, 8), float(row)) for row in range(8)]
    data = batch(rows)
    whole = serialize(data).num_bytes
    assert serialize(data[3:4]).num_bytes < whole / 6
    assert serialize(data[torch.tensor([3])]).num_bytes < whole / 6
    assert len(DataProto.concat([data[3:4], batch(rows)[5:6]])["media.x"].values) == 2000


def test_parts_joined_by_indices_are_in_the_order_of_the_whole():
    rows = [torch.full((n, 1), float(n)) for n in range(5)]
    parts = [torch.tensor([4, 0]), torch.tensor([1, 3, 2])]
    joined = DataProto.concat([batch(rows, n=list(range(5)))[part] for part in parts], parts)
    same(joined["media.x"], rows)
    assert joined["n"].tolist() == list(range(5))


def test_rows_of_a_part_without_images_are_empty_in_a_join():
    seen, text = batch([torch.ones(2, 3)], n=[1]), DataProto.from_dict(non_tensors={"n": [2, 3]})
    for parts, lengths in (([seen, text], [2, 0, 0]), ([text, seen], [0, 0, 2])):
        joined = DataProto.concat(parts)
        assert joined["media.x"].lengths.tolist() == lengths
        assert joined.producer("media.x").function == "batch"


def test_fields_are_chosen_moved_and_united_by_name():
    data = batch([torch.ones(2, 3)], n=[1])
    assert list(data.select([], []).ragged) == ["media.x"]
    assert not data.select(ragged_keys=[]).ragged
    assert data.to("meta")["media.x"].values.device.type == "meta"
    assert data.union(batch([torch.ones(2, 3)])).ragged.keys() == {"media.x"}
    popped = data.pop(ragged_keys=["media.x"])
    assert ("media.x" in popped, "media.x" in data) == (True, False)


def made(values=((1.0,),) * 3, offsets=(0, 1, 3), index=(0, 1)) -> DataProto:
    field = Ragged(torch.tensor(values), torch.tensor(offsets), torch.tensor(index))
    return DataProto.from_dict(ragged={"media.x": field})


ONE, TWO = [torch.ones(1, 2)], [torch.ones(1, 2), torch.zeros(1, 2)]
test_what_breaks_the_rules_of_a_ragged_field_is_refused_by_its_name = refused(
    ("media.x", 3, lambda: made(offsets=(0, 2, 1))),
    ("media.x", 3, lambda: made(offsets=(0, 1, 2))),
    ("media.x", 2, lambda: made(index=(0, 2))),
    ("media.x", "index", lambda: made(index=(0.0, 1.0))),
    ("media.x", "list", lambda: DataProto.from_dict(ragged={"media.x": [1]})),  # type: ignore[dict-item]
    ("values", "tensor", lambda: DataProto.from_dict(ragged={"values": Ragged.of(ONE)})),
    ("media.x", "column", lambda: DataProto.from_dict({"media.x": torch.ones(1)}, ragged={"media.x": Ragged.of(ONE)})),
    ("answer", [2], lambda: batch(ONE).union(DataProto.from_dict(non_tensors={"answer": [1, 2]}))),
    (("media.x", 1), "other values", lambda: batch(TWO).union(batch([TWO[0], TWO[0] + 1]))),
    ("media.x", "other values", lambda: batch(TWO).union(DataProto.from_dict({"media.x": torch.ones(2)}))),
    ("media.x", [3], lambda: DataProto.concat([batch(ONE), batch([torch.ones(1, 3)])])),
    ("media.x", "float64", lambda: DataProto.concat([batch(ONE), batch([torch.ones(1, 2).double()])])),
    (("media.x", 1), "2 others", lambda: batch([TWO[0], TWO[1] / 0]).check(strict=True)),
    ((), "differ", lambda: Ragged.of([torch.ones(1, 2), torch.ones(1, 3)])),
    kind=DataProtoValidationError,
)


def test_a_batch_without_images_is_saved_and_pickled_as_before(tmp_path):
    data = rollout()
    data.save(tmp_path / "text")
    assert not DataProto.load(tmp_path / "text").ragged
    packed, *_ = data.__getstate__()
    assert [name for name, *_ in packed] == list(data.batch)
