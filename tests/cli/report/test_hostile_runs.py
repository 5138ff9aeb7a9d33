"""The files of a run directory may be another person's: whatever they hold, commands end without a traceback."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.report.run_files import add_lineage, run_directory
from typer.testing import CliRunner

from verl.cli.main import app
from verl.utils.external_input import LARGEST_RECORD

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
DEEP = "[" * 900 + "]" * 900
HOSTILE = {
    "config.yaml": [BOMB, "a: &a [*a]\n", "a: " + DEEP, "a: {[1]: 2}", "trainer: {seed: [1]}", "- 1", "2001-99-99",
                    "1: 2\na: 3"],
    "overrides.yaml": [BOMB, "&a [*a]\n", DEEP, "a: 1", "- {a: 1}"],
    "metrics.jsonl": [f'{{"step": 1, "a": {DEEP}}}\n', '{"step": 1, "time_s": "inf"}\n{"step": [1]}\n'],
    "samples/step_0.jsonl": [f'{{"prompt_text": {DEEP}}}\n', '{"score": 1e999, "prompt_text": "\\ud800"}\n'],
    "evals/step_0.jsonl": ['{"kind": ["greedy"], "prompt_id": 1}\n', f'{{"kind": {DEEP}}}\n'],
    "tokens/step_1.jsonl": [f'{{"texts": {DEEP}}}\n', '{"texts": ["a"], "ids": [1e999]}\n'],
    "summary.json": [DEEP, '{"error": [[]], "data": [1], "status": {}}'],
    "start.json": ["[]", f'{{"differences": {{"a": {DEEP}}}}}', '{"differences": {"a": 3}}'],
    "plan.json": [DEEP, "3"],
    "environment.json": ["[]", f'{{"code": {DEEP}}}'],
    "checkpoints.json": ['{"save_dir": "/", "run_id": "x"}', '{"save_dir": "\\u0000", "run_id": "x"}', DEEP],
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run and a second one, `other`, next to it."""
    top = tmp_path_factory.mktemp("runs")
    for name in ("run", "other"):
        record = {
            "code": {"verl": "1", "commit": "abc", "modified": True},
            "packages": {"torch": "2"},
            "num_threads": 1,
        }
        (run_directory(top / name) / "environment.json").write_text(json.dumps(record))
        (top / name / "plan.json").write_text(json.dumps({"roles": [{"name": "actor", "gib": 1.0}]}))
        add_lineage(top / f"saved_{name}", name, top / name, None, "finished")
    return top / "run"


def read_everything(run: Path, out: Path) -> None:
    other = str(run.with_name("other"))
    for words in (
        ["report", str(run), "--html", str(out)], ["report", str(run), other, "--html", str(out)],
        ["diff", str(run), other], ["runs", str(run.parent)], ["watch", str(run)],
    ):  # fmt: skip
        result = CliRunner().invoke(app, words)
        assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exc_info)


@pytest.mark.slow
@pytest.mark.parametrize("file", HOSTILE)
def test_a_file_that_multiplies_nests_or_has_other_types_costs_itself_only(file, run, tmp_path):
    path = run / file
    before = path.read_bytes()
    try:
        for content in HOSTILE[file]:
            path.write_text(content)
            read_everything(run, tmp_path / "report.html")
    finally:
        path.write_bytes(before)


def test_a_line_without_end_ends_the_reading(run, tmp_path, caplog):
    with (run / "evals/step_10.jsonl").open("r+b") as file:
        file.truncate(2**40)  # sparse
    read_everything(run, tmp_path / "report.html")
    assert f"more than {LARGEST_RECORD} bytes" in caplog.text


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


def with_value(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    tree = {"": copy.deepcopy(tree)}
    node = tree
    for key in ("", *path)[:-1]:
        node = node[key]
    node[("", *path)[-1]] = value
    return tree[""]


@pytest.mark.slow
def test_any_value_of_any_file_may_have_any_type(run, tmp_path):
    chance, cases = random.Random(0), []
    for file in (path for path in run.rglob("*") if path.suffix in (".json", ".yaml")):
        tree = yaml.safe_load(file.read_text())
        cases += [
            (file, tree, path, value) for path in leaves(tree) for value in ([1], {"a": {}}, None, "x", 1e400, True)
        ]
    for file, tree, path, value in chance.sample(cases, 12):
        before = file.read_bytes()
        changed = with_value(tree, path, value)
        file.write_text(yaml.safe_dump(changed) if file.suffix == ".yaml" else json.dumps(changed))
        read_everything(run, tmp_path / "report.html")
        file.write_bytes(before)
