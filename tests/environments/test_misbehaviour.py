"""Environments that do what they should not, all beside each other: none is scored, none ends the run, and episodes
that share a process with them are played to their end."""

from __future__ import annotations

import logging

import pytest
from cases import has_tests
from environments.episodes import engine_of, prompts_of, tiny

from verl.environments.hosted import FunctionEnvironment
from verl.rollout.base import GenerationRequest

EACH = tuple(range(6, 100))  # every character ends a turn
WORLD = """
import asyncio, ctypes, gc, os, signal, sys, threading, time

import numpy as np

REPLIES = next(item for item in gc.get_objects() if type(item).__name__ == "Replies")


class NoWords(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Shouts(str):
    __hash__ = None


class Result:
    observation, terminated, truncated, info = "ok", False, False, {}


def recurses():
    return recurses()


def raises(error):
    raise error


def ring():
    error = ValueError("a ring")
    raise error from error


def with_reward(value):
    return "ok", value, False, False, {}


def ended(terminated, truncated=False):
    return "ok", 1.0, terminated, truncated, {}


def replies(number):
    wrong = {"observation": "wrong", "reward": 9.0, "terminated": True, "truncated": False, "info": {}}
    REPLIES.send({"id": number, "value": wrong})


def forks():
    if os.fork() == 0:
        return with_reward(7.0)
    time.sleep(0.2)
    return with_reward(1.0)


LOCK = threading.Lock()


def waits():
    with LOCK:
        return with_reward(1.0)


class World:
    def reset(self, row, seed):
        self.code, self.turn = row["code"], 0

    def step(self, action):
        self.turn += 1
        if self.turn == 2 and self.code:
            return eval(self.code, globals())
        return "ok", 1.0, self.turn >= 3, False, {}
"""
# What a step returns or does in its second turn -> what is said of it
NOT_SCORED = {
    "5": "step gave int: expected (observation, reward",
    "None": "step gave NoneType",
    "['ok', 1.0, False, False, {}]": "step gave list",
    "('ok', 1.0, False, {})": "step gave a tuple of 4",
    "{'observation': 'ok', 'terminated': False}": "step gave no reward",
    "Result()": "step gave no reward",
    "with_reward('1.0')": "step gave the reward '1.0'",
    "with_reward([1.0])": "step gave the reward [1.0]",
    "with_reward(None)": "step gave the reward None",
    "with_reward(float('nan'))": "step gave the reward nan",
    "with_reward(np.float64('-inf'))": "step gave the reward",
    "with_reward(1e39)": "step gave the reward 1e+39",
    "with_reward(10**400)": "step gave the reward",
    "with_reward(1j)": "step gave the reward 1j",
    "with_reward(np.ones(1))": "step gave the reward array",
    "with_reward(np.datetime64('2026-01-01'))": "step gave the reward",
    "ended(1)": "step gave terminated = 1: expected True or False",
    "ended(np.array([True, False]))": "step gave terminated = array",
    "ended(False, [])": "step gave truncated = []",
    "(None, 1.0, False, False, {})": "step gave no observation, and the episode continues",
    "({'a': 1}, 1.0, False, False, {})": "observation of type dict",
    "([{'role': 'user'}], 1.0, False, False, {})": "observation of type list",
    "(b'ok', 1.0, False, False, {})": "observation of type bytes",
    "('\\ud800', 1.0, False, False, {})": "not valid Unicode",
    "([{'role': 'user', 'content': 'x', 'more': {1, 2}}], 1.0, False, False, {})": "no JSON",
    "('x' * 9_000_000, 1.0, False, False, {})": "the answer has 8 MiB, and 8 may pass",
    "('ok', 1.0, False, False, [3])": "step gave info = [3]",
    "1 / 0": "ZeroDivisionError: division by zero, at line",
    "recurses()": "RecursionError",
    "ring()": "ValueError: a ring, at line",
    "raises(NoWords())": "NoWords, whose message cannot be read",
    "raises(SystemExit(0))": "SystemExit",
    "raises(KeyboardInterrupt())": "KeyboardInterrupt",
    "raises(TimeoutError('a service'))": "TimeoutError: a service",
    "raises(asyncio.CancelledError())": "CancelledError",
    "input()": "Error: ",  # another one may have closed the input
}
ENDS_ITS_PROCESS = {
    "os._exit(3)": "has ended (exit status 3)",
    "ctypes.string_at(0)": "has ended (signal SIGSEGV)",
    "os.kill(os.getpid(), signal.SIGKILL) or time.sleep(20)": "has ended (signal SIGKILL",
    "os.killpg(0, signal.SIGKILL) or time.sleep(20)": "has ended (signal SIGKILL",
    "os.closerange(3, 500)": "has ended (exit status",  # of whichever thread sees it first
    "os.write(REPLIES.channel.fileno(), bytes([0] * 7 + [9]) + b'{not json') and time.sleep(20)": "is not JSON",
    "os.kill(os.getpid(), signal.SIGSTOP) or time.sleep(20)": "it is stopped",
    "threading.Thread(target=os._exit, args=(4,)).start() or time.sleep(20)": "has ended (exit status 4)",
}
# What counts: how the episode ends, and its reward
SCORED = {
    "with_reward(True)": ("terminated", 3.0),
    "with_reward(False)": ("terminated", 2.0),
    "with_reward(np.float32(0.5))": ("terminated", 2.5),
    "with_reward(np.int64(4))": ("terminated", 6.0),
    "with_reward(np.bool_(True))": ("terminated", 3.0),
    "with_reward(np.array(2.0))": ("terminated", 4.0),
    "ended(np.bool_(True))": ("terminated", 2.0),
    "ended(False, np.bool_(True))": ("truncated", 2.0),
    "('ok', 1.0, False, False, {'calls': 3})": ("terminated", 3.0),
    "('ok', 1.0, False, False, {'set': {1}, 2: None})": ("terminated", 3.0),
    "(Shouts('ok'), 1.0, False, False, {})": ("terminated", 3.0),
    "forks()": ("terminated", 3.0),
    "replies(10**9) or with_reward(1.0)": ("terminated", 3.0),  # to no call
    "replies(1) or with_reward(1.0)": ("terminated", 3.0),  # to a call that was answered
    "print('y' * 17_000_000) or with_reward(1.0)": ("terminated", 3.0),
    "sys.stderr.write('y' * 17_000_000) and with_reward(1.0)": ("terminated", 3.0),
    "os.close(0) or os.close(1) or with_reward(1.0)": ("terminated", 3.0),
    "setattr(time, 'monotonic', lambda: 0.0) or with_reward(1.0)": ("terminated", 3.0),
    "LOCK.acquire() and time.sleep(60)": ("timeout", 1.0),
    "waits()": ("terminated", 3.0),  # for another episode
    "time.sleep(60)": ("timeout", 1.0),
    "exec('while True: time.perf_counter() % 1 < 0.2 or time.sleep(0.01)')": ("timeout", 1.0),
    "asyncio.sleep(60)": ("timeout", 1.0),
}
HOLDS_ITS_PROCESS = {"ctypes.PyDLL(None).sleep(30)": ("timeout", 1.0)}
INNOCENT = ["" for _ in range(12)]
LIMIT_S = 10.0  # of what ends by itself, on a busy machine too


@pytest.fixture(scope="module")
def played(request, tmp_path_factory):
    """Record of each episode, by what it does, and the log: all of them in two calls of an engine, with 12 innocent
    episodes beside those that end their process."""
    file = tmp_path_factory.mktemp("misbehaviour") / "world.py"
    file.write_text(WORLD)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("verl")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model, found = tiny(), dict[str, list]()
    environment = FunctionEnvironment(path=f"{file}:World", step_timeout_s=LIMIT_S, retries=0, reset_timeout_s=60.0)
    engine = engine_of(environment, model=model, stop_token_ids=EACH)
    try:
        ends = list(ENDS_ITS_PROCESS)[: None if has_tests(request, "slow") else 1]
        harmful = [*HOLDS_ITS_PROCESS, *ends]
        for codes in ([*NOT_SCORED, *SCORED], [*INNOCENT[:6], *harmful, *INNOCENT[6:]]):
            prompts = prompts_of(model[1], ["1="] * len(codes), code=codes)
            rows = engine.generate(prompts, GenerationRequest(1, 1))
            for code, record in zip(codes, rows["episode"], strict=True):
                found.setdefault(code, []).append(record)
    finally:
        engine.close()
        logger.removeHandler(handler)
        logger.setLevel(level)
    return found, lines, str(file)


@pytest.mark.first_rows(len(NOT_SCORED) + 1)
@pytest.mark.parametrize("code", [*NOT_SCORED, *ENDS_ITS_PROCESS])
def test_what_is_no_answer_of_a_step_is_never_scored_and_says_why(played, code):
    (record,) = played[0][code]
    assert record["end"] == "dropped", record
    assert (NOT_SCORED | ENDS_ITS_PROCESS)[code] in record["infra"][-1], record["infra"]


@pytest.mark.parametrize("code", [*SCORED, *HOLDS_ITS_PROCESS])
def test_what_is_an_answer_is_scored(played, code):
    (record,) = played[0][code]
    assert (record["end"], record["reward"]) == (SCORED | HOLDS_ITS_PROCESS)[code], record


def test_those_that_share_a_process_with_them_are_played_to_their_end(played):
    records = played[0][""]
    assert len(records) == len(INNOCENT)
    assert {(record["end"], record["reward"]) for record in records} == {("terminated", 3.0)}
    assert any(record["attempts"] > 1 for record in records)  # some did lose their process


def test_file_line_and_traceback_are_told_and_the_definition_where_a_value_is_wrong(played):
    records, lines, file = played
    raised, defined = (WORLD[: WORLD.index(text)].count("\n") + 1 for text in ("raise error from", "def step"))
    assert f"line {raised} of {file}, in ring()" in records["ring()"][0]["infra"][-1]
    assert f"World.step() at line {defined} of {file}" in records["5"][0]["infra"][-1]
    assert any("Traceback (most recent call last)" in line and "a ring" in line for line in lines)
    printed = [line for line in lines if line.startswith("environment ") and "yyyy" in line]
    assert 0 < len(printed) < 5000  # of 34,000, in several attempts
    assert max(map(len, printed)) < 1100
