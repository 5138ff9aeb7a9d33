"""Strict checks: each rule passes what is right, and names field, row and producer of what is not."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from batches import rollout, rollout_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from verl import config
from verl.errors import DataProtoValidationError
from verl.protocol import DataProto

ROOT = Path(__file__).resolve().parents[1]


def fixed() -> dict[str, torch.Tensor]:
    """P = 3, T = 4, three rows: prompts of 1, 2, 3 tokens, responses of 4, 2, 0; rows 0 and 1 are one group."""
    prompt_mask = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
    response_mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1).long()
    input_ids = torch.arange(1, 22).view(3, 7) * attention_mask
    return {
        "prompts": input_ids[:, :3].clone(),
        "prompt_mask": prompt_mask,
        "prompt_ids": torch.tensor([8, 8, 9]),
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "responses": input_ids[:, 3:].clone(),
        "response_mask": response_mask,
        "group_ids": torch.tensor([0, 0, 1]),
        "policy_version": torch.zeros(3, dtype=torch.int64),
        "old_log_probs": -response_mask.double(),
    }


BREAKS = [  # field, place and value, and the field and the row at fault
    ("old_log_probs", (1, 1), float("nan"), "old_log_probs", 1),
    ("old_log_probs", (0, 3), float("inf"), "old_log_probs", 0),
    ("old_log_probs", (1, 2), -0.5, "old_log_probs", 1),
    ("old_log_probs", (1, slice(2, 4)), -0.5, "old_log_probs", 1),
    ("old_log_probs", (2, 0), 1e-8, "old_log_probs", 2),
    ("response_mask", (1, 2), True, "response_mask", 1),
    ("prompt_mask", (0, 0), True, "prompt_mask", 0),
    ("prompt_mask", (2, 2), False, "prompt_mask", 2),
    ("prompt_mask", (0, 1), True, "prompt_mask", 0),
    ("attention_mask", (1, 6), 1, "attention_mask", 1),
    ("attention_mask", (0, 0), 1, "attention_mask", 0),
    ("attention_mask", (2, 0), 2, "attention_mask", 2),
    ("attention_mask", (1, 4), 0, "response_mask", 1),
    ("position_ids", (1, 3), 7, "position_ids", 1),
    ("position_ids", (0, 0), -1, "position_ids", 0),
    ("prompts", (2, 1), 40, "prompts", 2),
    ("responses", (1, 0), 40, "responses", 1),
    ("responses", (0, 0), -3, "responses", 0),
    ("prompt_ids", (1,), 9, "group_ids", 1),
    ("group_ids", (2,), 0, "group_ids", 2),
    ("policy_version", (2,), -1, "policy_version", 2),
]


def producer_fn():
    """Named in the errors below."""


@pytest.mark.parametrize(("name", "place", "value", "at_fault", "row"), BREAKS)
def test_a_broken_rule_names_field_rule_row_and_producer(name, place, value, at_fault, row):
    tensors = fixed()
    DataProto.from_dict(tensors).check(strict=True)
    tensors[name][place] = value
    data = DataProto.from_dict(tensors, producer=producer_fn).check()
    with refusal(at_fault, row, value="producer_fn()", kind=DataProtoValidationError):
        data.check(strict=True)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 9))
def test_a_rollout_of_any_lengths_passes(b, p, t, seed):
    data = rollout(b, p, t, seed).check(strict=True)
    for name in data.batch:
        data.select([name]).check(strict=True)


def test_tokens_of_a_tool_are_attended_and_not_chosen():
    tensors = fixed()
    tensors["response_mask"][0, 1:3] = False
    tensors["old_log_probs"][0, 1:3] = 0
    DataProto.from_dict(tensors).check(strict=True)


def test_large_finite_numbers_whose_sum_overflows_pass():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        DataProto.from_dict({"x": torch.full((4, 4), torch.finfo(dtype).max, dtype=dtype)}).check(strict=True)
    bad = torch.full((4, 4), torch.finfo(torch.float32).max)
    bad[2, 1] = torch.inf
    with refusal("x", 2, kind=DataProtoValidationError):
        DataProto.from_dict({"x": bad}).check(strict=True)


def test_supervised_rows_may_be_padded_anywhere_but_learn_attended_tokens_alone():
    tensors = {"attention_mask": torch.tensor([[1, 1, 0]]), "loss_mask": torch.tensor([[False, True, False]])}
    DataProto.from_dict(tensors).check(strict=True)
    tensors["loss_mask"][0, 2] = True
    with refusal("loss_mask", 0, kind=DataProtoValidationError):
        DataProto.from_dict(tensors).check(strict=True)


def test_a_mask_that_arrives_later_is_held_against_the_fields_that_are_there(monkeypatch):
    monkeypatch.setattr(config, "strict_data_check", True)
    values = DataProto.from_dict({"values": torch.ones(1, 2)}, producer=producer_fn)
    with refusal("values", 0, kind=DataProtoValidationError):
        values.union(DataProto.from_dict({"response_mask": torch.tensor([[True, False]])}))


def test_the_check_changes_nothing_and_leaves_gradients_alone():
    leaf = torch.zeros(2, 2, requires_grad=True)
    data = DataProto.from_dict({"log_probs": leaf * 1.0, "response_mask": torch.ones(2, 2).bool()})
    before = {name: tensor.clone() for name, tensor in rollout_tensors().items()}
    DataProto.from_dict(rollout_tensors()).check(strict=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in rollout_tensors().items())
    data.check(strict=True)["log_probs"].sum().backward()
    assert leaf.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), (" On ", True), ("0", False), ("", False), ("No", False)]
)
def test_a_flag_in_the_environment_is_read_as_people_write_it(text, value, monkeypatch):
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", text)
    assert config.flag("VERL_STRICT_DATA_CHECK") is value


def test_a_flag_that_is_neither_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "maybe")
    with refusal("VERL_STRICT_DATA_CHECK"):
        config.flag("VERL_STRICT_DATA_CHECK")


def test_the_environment_sets_the_flag_of_a_whole_process():
    code = "from verl import config; print(config.strict_data_check)"
    for setting, expected in (("1", "True"), ("0", "False")):
        environment = {"VERL_STRICT_DATA_CHECK": setting, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
