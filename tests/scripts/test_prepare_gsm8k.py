"""GSM8K's format becomes prompts and answers, and the recipe for it runs on a local model and file."""

import importlib.util
import json

import pyarrow.parquet
import pytest

from verl.compose.schema import conf_dir
from verl.rewards.math_rules import gsm8k_score


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, conf_dir().parent / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore
    spec.loader.exec_module(module)  # type: ignore
    return module


prepare = load_script("prepare_gsm8k")


@pytest.fixture
def questions(tmp_path):
    """20 rows of GSM8K's format, made up."""
    path = tmp_path / "questions.jsonl"
    rows = [
        {"question": f"{n} and {n}?", "answer": f"Add them: {n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"}
        for n in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_becomes_messages_a_number_and_a_solution_without_marks_of_sums(questions, tmp_path, capsys):
    assert prepare.main([str(tmp_path / "out"), "--from", str(questions), "--eval-from", str(questions)]) == 0
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert rows[3] == {
        "prompt": [{"role": "user", "content": f"3 and 3?\n{prepare.INSTRUCTION}"}],
        "answer": "6",
        "solution": "Add them: 3+3=6.\n#### 6",
    }
    assert capsys.readouterr().out.splitlines()[1] == f"{tmp_path}/out/test.parquet: 20 rows"


def test_thousands_are_written_without_commas_and_texts_on_request(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"question": " How many? ", "answer": "Many.\\n#### 1,250"}\n')
    arguments = ["--from", str(tmp_path / "one.jsonl"), "--style", "text", "--instruction", "", "--format", "jsonl"]
    assert prepare.main([str(tmp_path), *arguments]) == 0
    assert json.loads((tmp_path / "train.jsonl").read_text()) == {
        "prompt": "How many?",
        "answer": "1250",
        "solution": "Many.\n#### 1250",
    }


def test_a_row_without_a_number_is_named_or_skipped_with_a_count(tmp_path, capsys):
    rows = [{"question": "1?", "answer": "#### 1"}, {"question": "2?", "answer": "two"}, {"answer": "#### 3"}]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare.main([str(tmp_path), "--from", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"answer is 'two' at line 2 of {path}: expected a text that ends with #### 42." in said
    assert f"question is None at line 3 of {path}" in said
    assert prepare.main([str(tmp_path), "--from", str(path), "--on-bad-row", "skip"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/train.parquet: 1 rows, 2 left out\n"


def test_what_is_missing_is_said_in_words(tmp_path, capsys, monkeypatch):
    assert prepare.main([str(tmp_path), "--from", "absent.parquet"]) == 2
    assert capsys.readouterr().err == "--from[0] is 'absent.parquet': no such file.\n"
    monkeypatch.setitem(prepare.sys.modules, "datasets", None)
    assert prepare.main([str(tmp_path)]) == 2
    assert "datasets is not installed: pip install datasets, or give local files" in capsys.readouterr().err


def test_help_says_where_rows_come_from(capsys):
    with pytest.raises(SystemExit):
        prepare.main(["--help"])
    said = capsys.readouterr().out
    assert "python scripts/prepare_gsm8k.py data/gsm8k --from train.jsonl" in said


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("3+4=7\n#### 7", "7", 1.0),
        ("#### 1,250.", "1250", 1.0),
        ("#### $7.00", "7", 1.0),
        ("#### 8, not 7", "7", 0.0),
        ("so 5 and then 7.", "7", 1.0),
        ("7 then 5", "7", 0.0),
        ("-7", "7", 0.0),
        ("#### none", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_a_response_is_right_if_it_ends_with_the_number(response, answer, expected):
    assert gsm8k_score(prompts=["?"], responses=[response], answer=[answer]) == [expected]


def test_a_number_without_the_mark_can_be_refused():
    assert gsm8k_score(["?"] * 2, ["7", "#### 7"], ["7", "7"], needs_mark=True) == [0.0, 1.0]
