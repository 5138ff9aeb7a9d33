"""A twin has what its model has, and counts only if it tells what is wrong from what is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl.model_paths import check, twin
from verl.model_paths.check import TOLD_APART, Examination, examine, paths_for
from verl.model_paths.families import EVERY_LENGTH, default_model
from verl.model_paths.paths import FAST, PLAIN
from verl.model_paths.twin import ROW_TOKENS, crossed_lengths, make_twin
from verl.models.pretrained import Pretrained

WINDOWED = {  # the kinds of their layers, and how many lengths matter in them
    "mistral": (1, 1),
    "gemma3_text": (2, 1),
    "llama4_text": (2, 1),  # its chunks and the scale of its positions are of one length
    "gpt_neo": (2, 1),
    "gpt_oss": (2, 2),
}


@pytest.fixture(autouse=True)
def nothing_known(tmp_path, monkeypatch):
    """What earlier runs have found is not read."""
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", WINDOWED)
def test_each_planted_fault_is_told_apart(family):
    model = default_model(family)
    small = make_twin(model, EVERY_LENGTH)
    examination = Examination(small, model, EVERY_LENGTH)
    assert examination.blind_for() is None
    planted = {name: far for name, far in examination.distances.items() if name.startswith("planted")}
    assert {"planted: visible padding", "planted: a leaked segment"} <= planted.keys()
    moved = [name for name in planted if "that comes at" in name]
    assert len(moved) == 2 * len(small.lengths)
    assert min(planted.values()) > TOLD_APART, planted


@pytest.mark.parametrize("family", WINDOWED)
def test_a_twin_has_a_layer_of_each_kind_and_rows_that_cross_each_length(family):
    model, (kinds, lengths) = default_model(family), WINDOWED[family]
    small = make_twin(model, EVERY_LENGTH)
    assert type(small.model) is type(model)
    assert len(set(twin.layer_kinds(small.model))) == len(set(twin.layer_kinds(model))) == kinds
    assert len(small.lengths) == lengths
    assert max(small.lengths) < ROW_TOKENS
    assert sum(p.numel() for p in small.model.parameters()) < twin.MAX_PARAMETERS
    assert {p.dtype for p in small.model.parameters()} == {torch.float32}


def test_lengths_that_rows_of_the_run_do_not_exceed_are_not_crossed():
    model = default_model("mistral")
    assert model.config.sliding_window == 4096
    assert crossed_lengths(model.config, 4096) == ()
    assert crossed_lengths(model.config, 4097) == (4096,)
    assert make_twin(model, 4096).lengths == ()
    assert make_twin(model, 4096).model.config.sliding_window > ROW_TOKENS


def weak(model: Any) -> None:
    """Attention that gives nothing: neither padding nor another text shows."""
    for name, parameter in model.named_parameters():
        if "self_attn" in name:
            torch.nn.init.zeros_(parameter)


@pytest.mark.parametrize(("family", "weaken"), [("llama", weak)])
def test_a_twin_that_is_blind_to_a_planted_fault_does_not_count(family, weaken, monkeypatch):
    model, sharpen = default_model(family), twin.sharpen
    assert examine(model, EVERY_LENGTH).paths == FAST

    def blind(model: Any, *given: Any) -> None:
        sharpen(model, *given)
        weaken(model)

    monkeypatch.setattr(twin, "sharpen", blind)
    finding = examine(model, EVERY_LENGTH)
    assert finding.refusal is None
    assert finding.paths.scoring == PLAIN.scoring
    assert finding.paths.cache == PLAIN.cache
    (reason,) = finding.paths.reasons
    assert reason == "a small model of its kind does not tell visible padding from what is right"


def test_a_fault_that_shows_too_little_makes_a_twin_blind(monkeypatch):
    monkeypatch.setattr(check, "TOLD_APART", 1e3)
    (reason,) = examine(default_model("mistral"), EVERY_LENGTH).paths.reasons
    assert "does not tell a change at 24 tokens that comes at 23 from what is right" in reason


def test_what_was_found_is_kept_by_all_that_it_depends_on(dir32, tmp_path, monkeypatch):
    calls = []
    run = check.examine
    monkeypatch.setattr(check, "examine", lambda *given: calls.append(given) or run(*given))
    check.examine.__name__ = "examine"

    def found(row_tokens: int = 30, **changes: Any) -> int:
        before = len(calls)
        model = Pretrained(path=str(dir32)).load_causal_lm("cpu")
        for name, value in changes.items():
            setattr(model.config, name, value)
        paths_for(model, row_tokens)
        return len(calls) - before

    assert found() == 1
    assert found() == 0
    assert found(row_tokens=60) == 0  # nothing changes between 30 and 60 tokens
    assert found(rms_norm_eps=1e-3) == 1
    assert found(attention_dropout=0.5) == 1
    monkeypatch.setattr("verl.model_paths.finding_cache.library_versions", lambda: ["another"])
    assert found() == 1
    for file in (tmp_path / "cache/model_paths").glob("*.json"):
        file.write_text("[]")
    assert found() == 1
