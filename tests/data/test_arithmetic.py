"""Addition problems: held-out ones stay out of training, and every way to get them gives the same rows."""

import runpy
from pathlib import Path

import pytest
from refusals import refused

from verl.component import BuildContext
from verl.data.arithmetic import ArithmeticPrompts, ArithmeticSFT, permutation
from verl.data.files import PromptFiles, SFTFiles
from verl.models.tiny import character_tokenizer

main = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "make_arithmetic.py"))["main"]
CONTEXT = BuildContext(tokenizer=character_tokenizer())


def summands(row):
    return tuple(sorted(int(number) for number in row["prompt"].rstrip("=").split("+")))


def test_every_answer_is_the_sum_and_no_problem_comes_twice():
    data = ArithmeticPrompts()
    rows = data.rows("train") + data.rows("eval")
    assert all(int(row["answer"]) == sum(summands(row)) for row in rows)
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert len(data.rows("eval")) == 500


@pytest.mark.parametrize(("digits", "held_out", "seed"), [(1, 20, 0), (2, 500, 0), (2, 500, 7), (2, 3000, 1)])
def test_held_out_problems_are_not_in_training_in_either_order_of_their_summands(digits, held_out, seed):
    data = ArithmeticPrompts(digits=digits, held_out=held_out, seed=seed)
    assert not {summands(row) for row in data.rows("train")} & {summands(row) for row in data.rows("eval")}


def test_everything_that_is_not_held_out_is_trained_on_by_default():
    data = ArithmeticPrompts()
    everything = {(a, b) for a in range(10, 100) for b in range(a, 100)}
    seen = {summands(row) for row in data.rows("train")} | {summands(row) for row in data.rows("eval")}
    assert seen == everything


def test_summands_have_exactly_the_digits_that_are_asked_for():
    assert {len(row["prompt"]) for row in ArithmeticPrompts().rows("train")} == {len("10+10=")}
    assert {number for row in ArithmeticPrompts(digits=1, held_out=5).rows("train") for number in summands(row)} == set(
        range(10)
    )


def test_supervised_and_reinforcement_data_hold_out_the_same_problems_by_default():
    assert ArithmeticSFT().rows("eval") == ArithmeticPrompts().rows("eval")
    assert ArithmeticSFT(train_size=50).rows("eval") == ArithmeticPrompts().rows("eval")


def test_train_size_takes_the_first_problems_of_the_same_order():
    assert ArithmeticPrompts(train_size=40).rows("train") == ArithmeticPrompts().rows("train")[:40]


def test_the_problems_of_a_seed_never_change_and_another_seed_holds_out_others():
    assert [row["prompt"] for row in ArithmeticPrompts().rows("eval")[:3]] == ["85+99=", "78+29=", "47+87="]
    assert ArithmeticPrompts(seed=1).rows("eval") != ArithmeticPrompts().rows("eval")


@pytest.mark.parametrize("seed", range(5))
def test_the_order_visits_every_number_once(seed):
    order = list(permutation(200, seed))
    assert sorted(order) == list(range(200))
    assert order != list(range(200))


def test_a_million_problems_are_not_listed_to_take_a_few():
    rows = ArithmeticPrompts(digits=6, train_size=10, held_out=10).rows("train")
    assert len(rows) == 10
    assert max(len(row["prompt"]) for row in rows) == 14


def test_prompts_carry_their_answers_and_a_sequence_learns_the_answer_and_eos():
    tokenizer = CONTEXT.tokenizer
    splits = ArithmeticPrompts().build(CONTEXT)
    batch = splits.train.collate([5, 0])
    rows = ArithmeticPrompts().rows("train")
    assert list(batch["prompt_text"]) == [rows[5]["prompt"], rows[0]["prompt"]]
    assert list(batch["answer"]) == [rows[5]["answer"], rows[0]["answer"]]
    assert len(splits.eval) == 500
    learned = ArithmeticSFT().build(CONTEXT).train.collate([5])
    taught = learned["input_ids"][0][learned["loss_mask"][0]]
    assert tokenizer.decode(taught) == rows[5]["answer"] + "<eos>"


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_files_from_the_script_give_the_batches_of_the_description(suffix, tmp_path, capsys):
    assert main([str(tmp_path / "new"), "--format", suffix, "--train-size", "300", "--held-out", "40"]) == 0
    train, test = (str(tmp_path / "new" / f"{name}.{suffix}") for name in ("train", "test"))
    assert f"{train}: 300 rows" in capsys.readouterr().out
    files, sizes = {"train_files": [train], "eval_files": [test]}, {"train_size": 300, "held_out": 40}
    for read, made, names in (
        (PromptFiles(**files), ArithmeticPrompts(**sizes), ("prompts", "prompt_mask", "prompt_ids", "answer")),
        (SFTFiles(**files, completion_key="answer"), ArithmeticSFT(**sizes), ("input_ids", "loss_mask")),
    ):
        for split, rows in (("train", 300), ("eval", 40)):
            found, expected = (getattr(source.build(CONTEXT), split) for source in (read, made))
            assert len(found) == rows
            found, expected = found.collate(range(rows)), expected.collate(range(rows))
            assert all((found[name] == expected[name]).all() for name in names)


test_settings_that_cannot_work_are_refused_when_described = refused(
    ("digits", 0, lambda: ArithmeticPrompts(digits=0)),
    ("held_out", 0, lambda: ArithmeticPrompts(held_out=0)),
    ("held_out", 500, lambda: ArithmeticPrompts(digits=1)),
    ("train_size", None, lambda: ArithmeticPrompts(digits=3, train_size=None)),
    ("train_size", 7101, lambda: ArithmeticPrompts(train_size=7101)),
    ("max_prompt_length", 5, lambda: ArithmeticPrompts(max_prompt_length=5)),
    ("split", "test", lambda: ArithmeticPrompts().rows("test")),
)
