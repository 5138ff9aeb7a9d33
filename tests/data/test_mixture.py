"""Several files with weights: shares of an epoch, coverage of rows, and a state of three numbers."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from refusals import refused

from verl.component import BuildContext
from verl.data.files import PromptFiles, SFTFiles
from verl.data.sampler import DataSampler, Mixture
from verl.models.tiny import character_tokenizer

CONTEXT = BuildContext(tokenizer=character_tokenizer())


def sampler(sizes, weights, batch_size=1, seed=0):
    return DataSampler(sum(sizes), batch_size, seed, mixture=Mixture(sizes, weights))


def epochs(made, count):
    return [torch.cat([made.next_batch() for _ in range(made.batches_per_epoch)]).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("sizes", "weights", "counts"),
    [((10, 90), (1.0, 1.0), [50, 50]), ((5, 5), (3.0, 1.0), [8, 2]), ((1, 1, 1), (1.0, 1.0, 1.0), [1, 1, 1])],
)
def test_each_part_has_its_share_of_every_epoch(sizes, weights, counts):
    for rows in epochs(sampler(sizes, weights), 3):
        ends = [sum(sizes[: part + 1]) for part in range(len(sizes))]
        found = Counter(next(part for part, end in enumerate(ends) if row < end) for row in rows)
        assert [found[part] for part in range(len(sizes))] == counts


def test_a_part_visits_each_of_its_rows_before_any_again():
    rows = [row for epoch in epochs(sampler((4, 8), (1.0, 3.0)), 4) for row in epoch]
    assert Counter(row for row in rows if row < 4) == dict.fromkeys(range(4), 3)
    assert sorted(Counter(row for row in rows if row >= 4).values()) == [4] * 4 + [5] * 4


def test_parts_are_mixed_within_an_epoch():
    (rows,) = epochs(sampler((50, 50), (1.0, 1.0)), 1)
    assert 10 < sum(row < 50 for row in rows[:50]) < 40


def test_a_sampler_with_weights_goes_on_from_seed_epoch_and_position():
    saved = sampler((3, 9), (2.0, 1.0), batch_size=5, seed=7)
    for _ in range(5):
        saved.next_batch()
    loaded = sampler((3, 9), (2.0, 1.0), batch_size=5)
    loaded.load_state_dict(saved.state_dict())
    assert set(saved.state_dict()) == {"seed", "epoch", "position"}
    assert all(torch.equal(saved.next_batch(), loaded.next_batch()) for _ in range(7))


def write(path, texts):
    Path(path).write_text("".join(json.dumps({"prompt": text, "completion": "1"}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def files(tmp_path):
    return [write(tmp_path / "a.jsonl", ["1", "", "2"]), write(tmp_path / "b.jsonl", ["3", "4444", "5", "6"])]


def test_files_with_weights_are_the_parts_without_the_rows_that_were_left_out(files):
    options = {"train_files": files, "weights": [3, 1], "on_bad_row": "skip", "truncation": "drop"}
    prompts = PromptFiles(**options, max_prompt_length=2).build(CONTEXT)
    assert prompts.mixture == Mixture((2, 3), (3.0, 1.0))
    assert SFTFiles(**options, max_length=4).build(CONTEXT).mixture == Mixture((2, 3), (3.0, 1.0))
    assert PromptFiles(**{**options, "weights": None}).build(CONTEXT).mixture is None


def weighed(files, *weights, **options):
    return PromptFiles(train_files=files, weights=weights, **options)


SKIP = {"on_bad_row": "skip"}
test_weights_that_are_no_shares_are_refused = refused(
    ("weights", [1.0], lambda files: weighed(files, 1)),
    ("weights", [1.0, 0.0], lambda files: weighed(files, 1, 0)),
    ("weights[1]", float("nan"), lambda files: weighed(files, 1, float("nan"))),
    ("weights[0]", "x", lambda files: weighed(files, "x", 1)),
    ("weights", "a.jsonl", lambda files: weighed([write(files[0], [""]), *files[1:]], 1, 1, **SKIP).build(CONTEXT)),
)
