"""Generated chat tasks: enough different problems of each kind, none of them in both splits."""

import pytest

from verl.data.chat_task import PROBLEMS, ChatTask


@pytest.mark.slow
@pytest.mark.parametrize("task", PROBLEMS)
def test_the_largest_number_of_problems_is_made_of_different_ones(task):
    source = ChatTask(task=task, train_size=19_000, held_out=1000)
    train, held_out = ({row["prompt"][0]["content"] for row in source.rows(split)} for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (19_000, 1000)
    assert not train & held_out
