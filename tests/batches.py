"""Rollouts that keep every rule, for tests to use or to break."""

import torch
from hypothesis import strategies as st

from verl.protocol import DataProto


def rollout_tensors(b: int = 4, p: int = 3, t: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    """All fields of a rollout of b rows, with prompts and responses of every length, groups of two."""
    generator = torch.Generator().manual_seed(seed)
    prompt_mask = torch.arange(p) >= torch.randint(0, p, (b, 1), generator=generator)
    response_mask = torch.arange(t) < torch.randint(1, t + 1, (b, 1), generator=generator)
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1).long()
    input_ids = torch.randint(1, 50, (b, p + t), generator=generator) * attention_mask
    return {
        "prompts": input_ids[:, :p].clone(),
        "prompt_mask": prompt_mask,
        "prompt_ids": torch.arange(b) // 2 + 100,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "responses": input_ids[:, p:].clone(),
        "response_mask": response_mask,
        "sample_ids": torch.arange(b) % 2,
        "group_ids": torch.arange(b) // 2,
        "policy_version": torch.zeros(b, dtype=torch.int64),
        "values": torch.randn(b, t, generator=generator) * response_mask,
    }


def rollout(b: int = 4, p: int = 3, t: int = 5, seed: int = 0) -> DataProto:
    """The same as a batch, with a free field and a column."""
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = {**rollout_tensors(b, p, t, seed), "hidden": torch.randn(b, 2, 3, generator=generator)}
    return DataProto.from_dict(tensors, {"answer": [f"{seed}:{row}" for row in range(b)]}, {"step": 3})


def assert_same(left: DataProto, right: DataProto) -> None:
    """Equal fields in equal order with equal values, dtypes, shapes and facts."""
    assert list(left.batch) == list(right.batch)
    assert list(left.non_tensor_batch) == list(right.non_tensor_batch)
    for name, tensor in left.batch.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        assert torch.equal(tensor, right[name]), name
    for name, array in left.non_tensor_batch.items():
        assert array.tolist() == right[name].tolist()
    assert left.meta_info == right.meta_info
    assert len(left) == len(right)


@st.composite
def batches(draw, min_rows: int = 0) -> DataProto:
    rows, p, t = draw(st.integers(min_rows, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return rollout(rows, p, t, draw(st.integers(0, 3)))
