"""`warm-start://NAME` is trained once and found again."""

import dataclasses
import io

import pytest
from refusals import refusal
from rich.console import Console

from verl.compose import warm_start
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.compose.warm_start import resolve_warm_starts, warm_start_dir
from verl.utils.directories import kernel_cache_directory

SHORT = ["debug=smoke", "++data.held_out=10", "++data.train_size=64", "++trainer.batch_size=16"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE", str(tmp_path))
    return tmp_path / "warm_starts"


def test_a_warm_start_is_made_once_for_actor_and_critic_and_found_again(cache):
    run, out = validate(compose_root("ppo")), io.StringIO()
    resolved = resolve_warm_starts(run, Console(file=out, width=500), SHORT)
    (made,) = cache.iterdir()
    assert resolved.actor.model.path == resolved.critic.model.path == str(made / "actor")
    assert "is trained once" in out.getvalue()
    assert str(made) in out.getvalue()
    assert dataclasses.replace(resolved, actor=run.actor, critic=run.critic) == run
    assert resolved.actor.model.max_positions() == 64

    written = {file: file.stat().st_mtime_ns for file in made.rglob("*")}
    again = resolve_warm_starts(run, Console(file=out, width=500), SHORT)
    assert again == resolved
    assert {file: file.stat().st_mtime_ns for file in made.rglob("*")} == written
    assert out.getvalue().count("is trained once") == 1


def test_a_run_without_warm_start_is_returned_as_it_is(cache):
    run = validate(compose_root("ppo", ["actor=llama1b"]))
    assert resolve_warm_starts(run, Console(file=io.StringIO())) is run
    assert not cache.exists()


def test_an_unknown_warm_start_names_the_nearest_experiment(cache):
    run = validate(compose_root("ppo", ["++actor.model.path=warm-start://aritmetic_sft"]))
    with refusal("warm-start://aritmetic_sft", value="arithmetic_sft?"):
        resolve_warm_starts(run, Console(file=io.StringIO()))


def test_lengths_that_the_model_cannot_hold_are_refused_before_it_is_trained(cache):
    run = validate(compose_root("ppo", ["rollout.max_new_tokens=100"]))
    with refusal("data.max_prompt_length", value=100):
        resolve_warm_starts(run, Console(file=io.StringIO()), SHORT)
    assert not cache.exists()


def test_a_cache_that_cannot_be_is_refused_before_it_is_trained(tmp_path, monkeypatch):
    run = validate(compose_root("ppo"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "file" / "cache"))
    with refusal("VERL_CACHE"):
        resolve_warm_starts(run, Console(file=io.StringIO()), SHORT)
    for name in ("VERL_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without a home directory
    assert kernel_cache_directory() is None
    with refusal("VERL_CACHE"):
        resolve_warm_starts(run, Console(file=io.StringIO()), SHORT)


def test_the_key_follows_the_fine_tuning_run_and_the_sources(cache, monkeypatch):
    run = validate(compose_root("sft"))
    other = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, seed=1))
    assert warm_start_dir("x", run) == warm_start_dir("x", run)
    assert warm_start_dir("x", run) != warm_start_dir("x", other)
    before = warm_start_dir("x", run)
    monkeypatch.setattr(warm_start, "source_identity", lambda: "other sources")
    assert warm_start_dir("x", run) != before


def test_the_slower_of_two_processes_takes_what_the_faster_one_made(tmp_path):
    final, making = tmp_path / "final", tmp_path / "making"
    for directory, text in ((final, "first"), (making, "second")):
        (directory / "actor").mkdir(parents=True)
        (directory / "actor" / "config.json").write_text(text)
    warm_start.publish(making, final)
    assert (final / "actor" / "config.json").read_text() == "first"


@pytest.mark.slow
def test_a_failed_fine_tuning_leaves_nothing_behind(cache):
    run = validate(compose_root("ppo"))
    too_big = [*SHORT, "++trainer.batch_size=65"]
    with refusal("trainer.batch_size"):
        resolve_warm_starts(run, Console(file=io.StringIO()), too_big)
    assert list(cache.iterdir()) == []
