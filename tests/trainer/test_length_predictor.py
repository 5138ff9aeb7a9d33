"""Prompts are divided among processes by how long the responses to them are likely to be."""

from __future__ import annotations

import json

import pytest
import torch
from same_training import course, digest, newest
from trainer.runs import fit

from verl.checkpoint.read.reader import CheckpointReader
from verl.engines.sharding import DDP
from verl.ops.batching import BatchPartition
from verl.protocol import DataProto
from verl.trainer import sampling
from verl.trainer.sampling import LengthPredictor

STATE = "scheduler/state.json"


def rows(**lengths_of):
    """A row for each length of each prompt, which are named p0, p1, ..."""
    each = [(int(name[1:]), length) for name, lengths in lengths_of.items() for length in lengths]
    ids, lengths = torch.tensor(each).T
    return DataProto.from_dict({"prompt_ids": ids, "response_mask": torch.arange(20) < lengths[:, None]})


def prompts(*ids, width=2):
    mask = torch.ones(len(ids), width, dtype=torch.bool)
    return DataProto.from_dict({"prompt_ids": torch.tensor(ids), "prompt_mask": mask})


def expected(lengths, *ids, samples=2):
    return lengths.with_expected(prompts(*ids), samples)["expected_tokens"].tolist()


def test_a_prompt_is_expected_to_be_answered_as_last_and_a_new_one_as_others_are():
    lengths = LengthPredictor()
    assert expected(lengths, 3, 4) == [0, 0]
    lengths.note(rows(p3=[4, 6], p8=[1, 2]))
    assert expected(lengths, 3, 8, 5) == [10, 3, 6]  # of two responses: 2 * 5, 2 * 1.5, 2 * 3.25 to even
    lengths.note(rows(p3=[9]))
    assert expected(lengths, 3, samples=1) == [9]


def test_what_is_known_is_saved_and_the_prompts_that_were_seen_last_are_kept(monkeypatch):
    monkeypatch.setattr(sampling, "MOST", 2)
    lengths, other = LengthPredictor(), LengthPredictor()
    for name in ("p1", "p2", "p1", "p3"):
        lengths.note(rows(**{name: [int(name[1:])]}))
    assert lengths.state_dict() == {"prompts": [1, 3], "means": [1.0, 3.0]}
    other.load_state_dict(json.loads(json.dumps(lengths.state_dict())))
    assert expected(other, 1, 2, 3, samples=1) == [1, 2, 3]


def test_shares_are_of_like_length_and_like_number():
    lengths = LengthPredictor()
    lengths.note(rows(p0=[19], p1=[18], p2=[2], p3=[1]))
    assert [part.tolist() for part in BatchPartition(prompts(0, 1, 2, 3), 2).rows] == [[0, 2], [1, 3]]
    by_length = BatchPartition(lengths.with_expected(prompts(0, 1, 2, 3), 1), 2).rows
    assert [part.tolist() for part in by_length] == [[0, 3], [1, 2]]


@pytest.mark.exhaustive
@pytest.mark.xdist_group("two processes")
def test_processes_that_go_on_divide_prompts_as_they_would_have(model32, tmp_path):
    parts = {"sharding": DDP(), "n_gpus_per_node": 2}
    fit(course(model32, tmp_path / "whole", **parts), tmp_path / "whole/run")  # most prompts come twice
    resume = str(tmp_path / "whole/checkpoints/global_step_2")
    fit(course(model32, tmp_path, resume=resume, **parts), tmp_path / "run")
    assert digest(tmp_path) == digest(tmp_path / "whole")
    known = [json.loads(CheckpointReader(newest(at)).read(STATE).tobytes()) for at in (tmp_path / "whole", tmp_path)]
    assert known[0]["lengths"] == known[1]["lengths"]
    assert len(known[0]["lengths"]["prompts"]) == 7
