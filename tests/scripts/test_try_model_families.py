"""The script that makes the table of families finds again what the table has."""

import importlib.util
from pathlib import Path

import pytest
from model_paths.families import FAST, save_family

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "try_model_families.py"


@pytest.mark.slow
def test_the_fastest_paths_of_a_family_are_right(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("try_model_families", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.fastest(save_family(tmp_path, "qwen2")) == FAST
    assert capsys.readouterr().out == ""
