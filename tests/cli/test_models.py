"""`verl env --models` tells on which paths families of models run, and why others are refused."""

import sys

import pytest
from typer.testing import CliRunner

from verl.cli.main import app

runner = CliRunner()


def test_all_families_are_told_in_80_columns():
    result = runner.invoke(app, ["env", "--models"])
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert result.output.split()[:3] == ["model", "scoring", "decoding"]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", "llama  fast  packed   cache in place, shared prefix"),
        ("doge", "fast up to keep_window_size"),
        ("bert", "bert (is_decoder False)"),
        ("musicgen", "not built"),
    ],
)
def test_a_family_is_told(family, expected):
    result = runner.invoke(app, ["env", "--models", family])
    assert result.exit_code == 0
    assert expected in result.output


def test_a_family_that_is_not_known_is_answered_with_those_that_are_near():
    result = runner.invoke(app, ["env", "--models", "lama"])
    assert result.exit_code == 2
    assert "family is 'lama': no model of this model_type was tried" in result.stderr
    assert "Did you mean llama" in result.stderr
    result = runner.invoke(app, ["env", "llama"])
    assert result.exit_code == 2
    assert "FAMILY needs --models" in result.output


def test_the_table_needs_neither_torch_nor_transformers(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "llama" in runner.invoke(app, ["env", "--models", "llama"]).output
