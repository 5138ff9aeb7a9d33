"""A reward function of this process that does not return in time ends with its line, whatever it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from same_training import course
from trainer.runs import Prompts, fit

from verl.component import component
from verl.errors import RewardError
from verl.rewards.base import Reward, RewardDescription, in_time
from verl.rewards.deadline import call_within
from verl.rewards.function import CallableReward
from verl.rewards.rules import ExactMatch
from verl.rewards.weighted_sum import WeightedSum
from verl.trainer.api.pipeline import DataPipeline, RLTrainer
from verl.trainer.api.trainer import Trainer


def sleeps(prompts, responses):
    time.sleep(600)


def computes_for_ever(prompts, responses):
    while True:
        sum(range(100))


def waits_for_a_lock(prompts, responses):
    threading.Event().wait()


def catches_what_it_can(prompts, responses):
    with contextlib.suppress(Exception):
        time.sleep(600)
    try:
        time.sleep(600)
    except:  # noqa: E722 - as users write it
        time.sleep(600)


async def awaits_for_ever(prompts, responses):
    await asyncio.Event().wait()


def waits_for_its_threads(prompts, responses):
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    thread.join()


HANGING = [sleeps, computes_for_ever, waits_for_a_lock, catches_what_it_can, awaits_for_ever, waits_for_its_threads]


@pytest.mark.parametrize("function", HANGING)
def test_a_function_that_hangs_ends_with_its_name_its_line_and_the_setting(function):
    before, began = signal.getsignal(signal.SIGURG), time.monotonic()
    with pytest.raises(RewardError) as refused:
        CallableReward(function, timeout_s=0.2).score(["1+1="], ["2"])
    assert f"The reward function {function.__name__}() failed" in str(refused.value)
    assert "no answer within 0.2 s (reward.timeout_s)" in str(refused.value)
    assert "in test_deadline.py" in str(refused.value)
    assert "It was at line" in str(refused.value) or function is awaits_for_ever
    assert time.monotonic() - began < 60
    assert signal.getsignal(signal.SIGURG) == before


def test_in_another_thread_a_function_that_hangs_is_left_behind_there():
    caught: list[BaseException] = []

    def score() -> None:
        try:
            CallableReward(sleeps, timeout_s=0.2).score(["1+1="], ["2"])
        except RewardError as error:
            caught.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    thread.join(60)
    assert "It was at line" in str(caught[0])
    assert "time.sleep(600)" in str(caught[0])


def test_time_outs_of_the_function_by_a_signal_of_its_own_go_on_working():
    def own_alarm(prompts, responses):
        def late(number, frame):
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(600)
        except TimeoutError:
            return [3.0]
        finally:
            signal.signal(signal.SIGALRM, before)

    assert CallableReward(own_alarm, timeout_s=60).score(["1+1="], ["2"]) == [3.0]


def test_what_a_call_raises_and_gives_in_time_is_as_without_a_deadline():
    def fails() -> None:
        raise KeyError("mine")

    for run in (lambda call: call(), in_a_thread):
        assert run(lambda: call_within(60, lambda: 7)) == 7
        with pytest.raises(KeyError, match="mine"):
            run(lambda: call_within(60, fails))


def in_a_thread(call):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


class Hangs(Reward):
    def score(self, prompts, responses, **columns):
        time.sleep(600)


@pytest.mark.slow
def test_a_run_whose_reward_was_passed_as_an_object_and_hangs_ends_with_a_named_error(model32, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": text} for text in Prompts().train[:4]]
    given = {"model": model32.path, "train_dataset": rows, "rollout_config": {"max_new_tokens": 4, "n": 2}}
    given["train_config"] = {"total_steps": 1, "prompts_per_step": 2}
    with Trainer(**given, reward_model=sleeps, overrides=["reward.timeout_s=0.3"]) as trainer:
        trainer.reward_model = Hangs()
        with pytest.raises(RewardError, match=r"score\(\) failed(.|\n)*no answer within 0.3 s"):
            trainer.fit()
    given["actors"], given["data"] = [given.pop("model")], given.pop("train_dataset")
    given |= {"reward_models": [sleeps, Hangs()], "overrides": ["reward.parts.sleeps.timeout_s=0.3"]}
    with pytest.raises(RewardError, match=r"sleeps\(\) failed(.|\n)*no answer within 0.3 s"):
        RLTrainer(DataPipeline(**given)).run()


STUCK = """
import ctypes
from verl.rewards import deadline

deadline.GRACE_S = deadline.REPEATED_S = 0.1
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_init(mutex, None)
library.pthread_mutex_lock(mutex)
deadline.call_within(0.1, lambda: library.pthread_mutex_lock(mutex))
"""


def test_a_call_that_never_comes_back_from_a_library_ends_the_process_in_words():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "has not returned for 0.2 s (reward.timeout_s is 0.1) and cannot be interrupted" in done.stderr


@component
class HangingComponent(RewardDescription, Reward):
    """A reward of the user, chosen by `_target_`."""

    call_timeout_s = 0.3

    def score(self, prompts, responses, **columns):
        time.sleep(600)


class SaysNothing(HangingComponent):
    call_timeout_s = Reward.call_timeout_s


def test_a_reward_component_of_the_user_has_the_deadline_of_its_class_or_that_of_a_batch(tmp_path, model32):
    assert in_time(Hangs()).call_timeout_s == 60
    assert in_time(SaysNothing()).call_timeout_s is None
    assert in_time(ExactMatch()).call_timeout_s is None
    run = course(model32, tmp_path, total_steps=1)
    described = WeightedSum(parts={"own": HangingComponent()}, weights={"own": 1.0})
    for reward in (HangingComponent(), described):
        with pytest.raises(RewardError, match=r"score\(\) failed(.|\n)*no answer within 0.3 s"):
            fit(replace(run, reward=reward), tmp_path / type(reward).__name__)
