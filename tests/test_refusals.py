"""A refusal fails for another path, value or kind, and for a sentence that is not the one in the file."""

from pathlib import Path

import pytest
import refusals
from refusals import plain, refusal, refused, shows, snapshot

from verl.errors import CheckpointNotFound, ConfigError


@pytest.mark.parametrize(
    ("names", "value", "kind"), [("b", 1, ConfigError), ("a", 2, ConfigError), ("ab", 1, ConfigError)]
)
def test_another_path_another_value_and_more_faults_fail(names, value, kind):
    with pytest.raises(AssertionError), refusal(*names, value=value, kind=kind):
        raise ConfigError("a is 1: no.")
    with pytest.raises(CheckpointNotFound), refusal(*names):
        raise CheckpointNotFound("a")


@pytest.mark.parametrize(
    ("text", "value", "is_shown"),
    [("a is 1: b", 1, True), ("a is 10: b", 1, False), ("a is 0.1", 1, False), ("a is 'x y': b", "x y", True),
     ("a is null", None, True), ("a is none", None, False), ("a is true", True, True), ("a is ''", "", True)],
)  # fmt: skip
def test_a_value_is_a_word_of_its_own(text, value, is_shown):
    assert shows(text, value) == is_shown


def test_what_differs_from_run_to_run_is_left_out(tmp_path):
    text = f"{tmp_path}/a, {tmp_path.parent}/models0/b, {refusals.TESTS.parent}/verl: process 123 at localhost:4567"
    assert plain(text, tmp_path) == "TMP/a, SESSION/b, ROOT/verl: process N at localhost:PORT"


def test_a_changed_sentence_and_a_new_refusal_fail_until_the_file_is_refreshed(tmp_path, monkeypatch):
    def told(sentence: str, test: str = "test_c[x y]") -> None:
        refusals._counted.clear()
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"tests/a/test_b.py::{test} (call)")
        with refusal("a"):
            raise ConfigError(sentence)

    monkeypatch.setattr(refusals, "TESTS", tmp_path / "tests")
    monkeypatch.delenv("REFUSALS", raising=False)
    file = tmp_path / "tests/a/refusals.txt"
    file.parent.mkdir(parents=True)
    told("a is 1")  # without a file nothing is compared
    file.touch()
    (file.parent / "test_b.py").write_text("def test_c(): ...\ntest_d = refused()")
    with pytest.raises(AssertionError, match="without a sentence"):
        told("a is 1")
    monkeypatch.setenv("REFUSALS", "refresh")
    told("a is 1")
    told("a is 2", "test_d")
    file.write_text(file.read_text() + "== test_b.py::test_gone 1\na\n")
    told("a is 2", "test_d")
    monkeypatch.delenv("REFUSALS")
    assert snapshot(file) == {"test_b.py::test_c[x y] 1": "a is 1", "test_b.py::test_d 1": "a is 2"}
    told("a is 1")
    with pytest.raises(AssertionError, match="the sentence changed"):
        told("a is 2")


def test_every_sentence_in_the_files_is_of_a_test_that_is_there():
    files = [*Path(refusals.__file__).parent.rglob("refusals.txt")]
    assert [key for file in files for key in snapshot(file) if not refusals.exists(file, key)] == []


def error(tmp_path: Path) -> None:
    raise FileNotFoundError(f"{tmp_path} is 3")


test_rows_are_tests_whose_functions_take_fixtures = refused(("is", 3, error, FileNotFoundError))
