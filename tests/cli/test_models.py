"""`verl env --models` tells which ways of running a model are used, and why others are not."""

from __future__ import annotations

import sys

import pytest
from model_paths.families import save_family, start_family
from roles import start_critic
from typer.testing import CliRunner

from verl.cli.main import app
from verl.errors import ConfigError
from verl.model_paths import finding_cache, report
from verl.models.pretrained import Pretrained

runner = CliRunner()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing was tried yet."""
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/model_paths"


@pytest.fixture
def tried(tmp_path):
    """A policy on a fast path with its critic, one on a plain path, and one that is refused."""
    path = save_family(tmp_path / "llama", "llama")
    start_family(path)
    start_critic(Pretrained(path=str(path)))
    start_family(save_family(tmp_path / "bart", "bart"))
    with pytest.raises(ConfigError):
        start_family(save_family(tmp_path / "bert", "bert"))


def test_a_machine_on_which_no_model_was_tried_says_how_to_try_one():
    assert "models checked here: none yet; see verl env --models" in runner.invoke(app, ["env"]).output
    result = runner.invoke(app, ["env", "--models"])
    assert result.exit_code == 0
    assert "No model has been checked on this machine" in result.output


def test_what_runs_have_found_is_told_in_80_columns(tried):
    output = runner.invoke(app, ["env"]).output
    assert "    models checked here: 2 fast, 1 plain, 1 refused; see verl env --models\n" in output
    assert "        bart: plain: padded right, in place, equal prompts\n" in output
    assert "        bert: refused: each token sees those that come after it" in output
    result = runner.invoke(app, ["env", "--models"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["model", "scoring", "decoding"]
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == ["bart", "bert", "llama", "llama"]
    assert "llama           packed, shared prompts  in place, shared prefix" in lines
    assert "llama (critic)  packed, shared prompts" in lines


def test_a_file_that_is_not_ours_or_of_other_libraries_is_passed_over(tried, cache, monkeypatch):
    (cache / "a.json").write_text("[1, 2]")
    (cache / "b.json").write_text("{")
    (cache / "c.json").mkdir()
    assert len(report.cached_findings()) == 4
    monkeypatch.setattr(finding_cache, "library_versions", lambda: ["another"])
    assert report.cached_findings() == []


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ["llama (LlamaForCausalLM): fast, ", "    scoring  packed, shared prompts\n"]),
        (
            "doge",
            [
                "doge (DogeForCausalLM): fast, rows of up to 2048 tokens, ",
                "    longer   refused: the numbers of a token change with the length of its row\n",
                "    not used packed lines: NotImplementedError",
            ],
        ),
        (
            "roberta",
            ["roberta (RobertaForCausalLM): refused, ", "    because  each token sees those that come after it"],
        ),
        ("musicgen", ["musicgen: transformers cannot build its default model\n    because  StrictDataclassField"]),
    ],
)
def test_a_family_is_tried_now(family, expected, cache):
    result = runner.invoke(app, ["env", "--models", family])
    assert result.exit_code == 0
    for text in expected:
        assert text in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert not cache.exists()


def test_a_family_that_is_not_known_is_answered_with_those_that_are_near():
    result = runner.invoke(app, ["env", "--models", "lama"])
    assert result.exit_code == 2
    assert "family is 'lama': transformers has no causal language model of this model_type. Did you mean llama" in (
        result.stderr
    )
    result = runner.invoke(app, ["env", "llama"])
    assert result.exit_code == 2
    assert "FAMILY needs --models" in result.output


def test_nothing_is_needed_to_be_told_what_is_lacking(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "No model has been checked" in runner.invoke(app, ["env", "--models"]).output
    result = runner.invoke(app, ["env", "--models", "llama"])
    assert result.exit_code == 2
    assert "Models cannot be checked without torch, transformers, numpy: see verl env." in result.stderr
