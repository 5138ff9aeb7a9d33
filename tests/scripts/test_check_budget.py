"""The size of the project against its budget."""

from pathlib import Path

from scripts.check_budget import above, sizes


def test_lines_are_counted_by_package_and_what_is_above_is_named(tmp_path: Path) -> None:
    files = {"verl/__init__.py": 2, "verl/ops/a.py": 3, "verl/ops/b/c.py": 4, "tests/test_a.py": 5, "conf/a/b.yaml": 6}
    for name, lines in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#\n" * lines)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("a" * 1025)
    counted = sizes(tmp_path)
    assert counted["packages"] == {"ops": 7, "verl": 2}
    assert counted["whole"] == {"verl": 9, "tests": 5, "conf": 6, "docs_kb": 2, "docs_pages": 1}
    assert above(counted, counted) == []
    faults = above(counted, {"whole": {**counted["whole"], "conf": 5}, "packages": {"ops": 7}})
    assert [fault.partition(":")[0] for fault in faults] == ["budget.toml, whole.conf", "budget.toml, packages.verl"]
