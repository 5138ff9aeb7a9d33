"""Asynchronous training on episodes: equal to the synchronous one at staleness 0, repeatable, and resumable."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from environments.digit_game import DigitGames
from same_training import course, same_training, saved
from trainer.runs import GRPO_ALGORITHM, fit, step_lines

from verl.algorithms.importance_sampling import TruncatedIS
from verl.component import BuildContext
from verl.data.files import PromptFiles
from verl.errors import WorkerDied
from verl.models.tiny import TinyModel
from verl.rewards.episode_reward import EpisodeReward
from verl.rollout.hf import HFRollout
from verl.trainer import build
from verl.trainer.ppo import PPOTrainer
from verl.trainer.train_loop import TrainLoop
from verl.workers.schedule import FILE

CORRECTED = dataclasses.replace(GRPO_ALGORITHM, correction=TruncatedIS(), mini_batches=1)
STOPS = tuple(range(20, 60))  # random weights seldom end a turn by themselves
# Others answer at moments that no two runs share, and what is computed side by side decides the last bits.
GAMES = DigitGames(recovery="deterministic", answers_at_once=True, max_tokens=40, max_turns=4)


def playing(model, directory, staleness=1, environment=GAMES, **options):
    if environment.history == "rerender":  # which is of chats
        rows = directory.parent / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(8)))
        files = {"train_files": (str(rows),), "eval_files": (str(rows),)}
        options["data"] = PromptFiles(**files, system_prompt="add", max_prompt_length=40)  # type: ignore
        model = TinyModel(context_length=160, hidden_size=32, intermediate_size=64)
    settings = {"mode": "async", "max_staleness": staleness, "prompts_per_step": 2, "group_size": 3, **options}
    settings.setdefault("rollout", HFRollout(max_new_tokens=6, stop_token_ids=STOPS))
    run = course(model, directory, CORRECTED, **settings)
    return dataclasses.replace(run, environment=environment, reward=EpisodeReward())


def in_flight(model, directory, kv_cache: Any = "recompute", environment=GAMES, **options):
    """Episodes of several turns, long enough for updates within them."""
    engine: Any = {"max_new_tokens": 10, "stop_token_ids": STOPS[:8], "weight_update": "in_flight"}
    rollout = HFRollout(**engine, kv_cache=kv_cache)
    return playing(model, directory, 2, environment, rollout=rollout, total_steps=6, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_cache", "history"),
    [
        ("recompute", "append"),
        pytest.param("keep", "append", marks=pytest.mark.exhaustive),
        pytest.param("recompute", "rerender", marks=pytest.mark.exhaustive),
    ],
)
def test_episodes_go_on_across_updates_and_are_repeated_by_their_schedule(
    kv_cache, history, model32, tmp_path, monkeypatch
):
    games, mixed, update = dataclasses.replace(GAMES, history=history), [], PPOTrainer.update

    def noted(self, experience, step):
        rows = zip(experience["token_versions"], experience["response_mask"], strict=True)
        versions = [set(row[is_sampled].tolist()) for row, is_sampled in rows]
        assert all(step - 3 <= min(found) for found in versions)
        mixed.append(sum(len(found) > 1 for found in versions))
        return update(self, experience, step)

    monkeypatch.setattr(PPOTrainer, "update", noted)
    fit(in_flight(model32, tmp_path / "first", kv_cache, games), tmp_path / "first/run")
    first, schedule = saved(tmp_path / "first"), (tmp_path / "first/run" / FILE).read_bytes()
    assert max(line["episode/turns"] for line in first.metrics.values()) > 1
    replay = {"replay_schedule": str(tmp_path / "first/run")}
    fit(in_flight(model32, tmp_path / "again", kv_cache, games, **replay), tmp_path / "again/run")
    same_training(saved(tmp_path / "again"), first)
    resume = tmp_path / "first/checkpoints/global_step_3"
    fit(in_flight(model32, tmp_path / "cut", kv_cache, games, resume=resume, **replay), tmp_path / "cut/run")
    same_training(saved(tmp_path / "cut"), first, after=3)
    for name in ("again", "cut"):
        assert (tmp_path / name / "run" / FILE).read_bytes() == schedule
    assert mixed == mixed[:6] * 2 + mixed[3:6]


@pytest.mark.slow
def test_a_sampler_killed_inside_of_episodes_is_named_and_a_resume_goes_on_with_their_journal(model32, tmp_path):
    fatal = tmp_path / "fatal"
    games = dataclasses.replace(GAMES, fatal=str(fatal))
    fit(playing(model32, tmp_path / "whole", 1, games), tmp_path / "whole/run")
    with playing(model32, tmp_path, 1, games).build(BuildContext(run_dir=tmp_path / "first")) as trainer:
        loop = TrainLoop(trainer, {})
        loop.open()
        loop.step()
        loop.step()
        fatal.touch()
        with pytest.raises(WorkerDied, match=r"rollout\.generate at step 4.*\n.*SIGKILL"):
            loop.step()
    fatal.unlink()
    fit(playing(model32, tmp_path, 1, games, resume="latest"), tmp_path / "run")
    same_training(saved(tmp_path), saved(tmp_path / "whole"), after=2)
    replayed = [line.get("episode/journal_replayed", 0) for line in step_lines(tmp_path / "run")]
    assert replayed[0] == 0  # the episodes of step 3 are in the checkpoint
    assert replayed[1] >= 6  # resets too


def test_threads_that_were_left_to_the_sampler_are_given_back(model32, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "num_cores", lambda: 2)
    threads, quiet = torch.get_num_threads(), {"num_threads": None, "total_steps": 1}
    torch.set_num_threads(2)
    try:
        with playing(model32, tmp_path / "sync", mode="sync", **quiet).build(BuildContext(run_dir=tmp_path / "a")):
            with playing(model32, tmp_path / "async", **quiet).build(BuildContext(run_dir=tmp_path / "b")):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
