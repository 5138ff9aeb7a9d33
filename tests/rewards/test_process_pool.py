"""Rewards of one sample at a time: calls that hang, crash, raise and return nonsense, in real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from textwrap import dedent

import pytest
from cases import exhaustive
from cluster.processes_of import is_running, wait_until_gone
from refusals import refusal
from rewards import rated

from verl.component import BuildContext
from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.rewards import process_pool
from verl.rewards.function import RewardFunction
from verl.rewards.process_pool import FunctionPool

RESPONSES = ["0", "1", "2", "3", "4"]


def batch_of(responses):
    responses = list(responses)
    return rated.batch_of(responses, answer=responses)


@pytest.fixture
def batch():
    return batch_of(RESPONSES)


@pytest.fixture
def made(tmp_path):
    """Write a reward file, whose first line is empty, and build the reward; it is closed after the test."""
    rewards = []

    def make(source, **settings):
        path = tmp_path / "reward.py"
        path.write_text("\n" + dedent(source).strip() + "\n")
        settings = {"num_workers": 2, "timeout_s": 20.0, **settings}
        rewards.append(
            RewardFunction(path=f"{path}:my_reward", per_sample=True, **settings).build(BuildContext())  # type: ignore[arg-type]
        )
        return rewards[-1]

    yield make
    for reward in rewards:
        reward.close()


def processes_of(reward):
    return [worker.pid for worker in reward.pool.workers]


def test_each_sample_is_a_call_with_its_own_columns_and_scores_keep_their_order(made, batch):
    reward = made(
        """
        def my_reward(prompt, response, answer, bonus=0.0):
            assert prompt == f"prompt {answer}" and response == answer
            return float(answer) + bonus
        """,
        kwargs={"bonus": 0.5},
    )
    scored = reward.score_tokens(batch)
    assert list(scored["score"]) == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert scored["token_level_scores"][:, 1].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert str(scored.producer("token_level_scores")) == "my_reward() at line 2 in reward.py"
    assert len(reward.score_tokens(batch[[]])) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "hang",
    [
        pytest.param("while True: pass", marks=pytest.mark.exhaustive),
        pytest.param("__import__('time').sleep(1000)", marks=pytest.mark.exhaustive),
        "__import__('re').match('(a+)+$', 'a' * 64 + 'b')",  # never lets go of the interpreter
        pytest.param(  # deaf to signals
            "__import__('signal').pthread_sigmask(0, range(1, 32)), __import__('time').sleep(1000)",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(  # stopped: even its own watchdog stands still
            "__import__('os').kill(__import__('os').getpid(), 19)", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_hanging_sample_costs_itself_only(hang, made, batch):
    reward = made(
        f"def my_reward(prompt, response):\n    if response == '2':\n        {hang}\n    return float(response)",
        timeout_s=0.5,
        on_error="score",
        error_score=-1.0,
    )
    before = processes_of(reward)
    scored = reward.score_tokens(batch)
    assert list(scored["score"]) == [0, 1, -1, 3, 4]
    assert list(scored["reward/failed"]) == [0, 0, 1, 0, 0]
    assert sum(map(is_running, before)) <= 1  # on a busy machine the other one may have been given up too
    assert list(reward.score_tokens(batch)["score"]) == [0, 1, -1, 3, 4]  # by a new process


def test_a_hanging_sample_is_reported_with_the_line_it_hangs_at(made, batch):
    reward = made(
        """
        def wait(text):
            while text == "3":
                pass
            return 1.0

        def my_reward(prompt, response):
            return wait(response)
        """,
        timeout_s=0.5,
    )
    with pytest.raises(RewardError) as refused:
        reward.score_tokens(batch)
    message = str(refused.value)
    assert "Expected: one finite number" in message
    assert "Found: no answer within timeout_s, which is 0.5: its process was killed" in message
    assert "It was at line 3, in wait()" in message or "It was at line 4, in wait()" in message
    assert "Sample: 3, prompt 'prompt 3', response '3'" in message
    assert "Source: my_reward() at line 7 in reward.py" in message


def test_a_process_started_by_a_hanging_sample_ends_with_it(made, batch, tmp_path, monkeypatch):
    told = tmp_path / "child"
    reward = made(
        f"""
        import subprocess, sys
        def my_reward(prompt, response):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
            open({str(told)!r}, "w").write(str(child.pid))
            child.wait()
        """,
        on_error="score",
    )
    idle_s = property(lambda watch: 1e9 if told.exists() and told.read_text() else 0.0)  # late once it is there
    monkeypatch.setattr(process_pool._SampleWatch, "idle_s", idle_s)
    assert list(reward.score_tokens(batch[[0]])["score"]) == [0.0]
    assert wait_until_gone([int(told.read_text())]) == []


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os._exit(3)", "the process ended with exit status 3"),
        ("os.kill(os.getpid(), 11)", "the process ended with signal SIGSEGV"),
        ("os.kill(os.getpid(), 9)", "the process ended with signal SIGKILL"),
        ("exit(1)", "SystemExit: 1"),
        pytest.param("raise KeyboardInterrupt", "KeyboardInterrupt", marks=pytest.mark.exhaustive),
        pytest.param("my_reward(prompt, response)", "RecursionError", marks=pytest.mark.exhaustive),
    ],
)
def test_a_sample_that_ends_its_process_or_raises_costs_itself_only(end, words, made, batch, caplog):
    reward = made(
        f"import os\ndef my_reward(prompt, response):\n    if response == '1': {end}\n    return float(response)",
        on_error="score",
        error_score=9.0,
    )
    assert list(reward.score_tokens(batch)["score"]) == [0, 9, 2, 3, 4]
    assert f"Found: {words}" in caplog.text
    assert "1 of 5 samples failed and get error_score 9" in caplog.text
    assert "Sample: 1, prompt 'prompt 1'" in caplog.text


def test_of_several_samples_that_raise_the_first_is_reported_with_its_line(made, batch):
    reward = made(
        """
        import time
        def half(text):
            time.sleep(0.3 if text == "3" else 0)
            return 1 / max(0, 3 - int(text))

        def my_reward(prompt, response):
            return half(response)
        """,
        num_workers=3,
    )
    with pytest.raises(RewardError) as refused:
        reward.score_tokens(batch_of(map(str, range(40))))
    message = str(refused.value)
    assert "Found: ZeroDivisionError: division by zero" in message
    assert "Raised at line 5: return 1 / max(0, 3 - int(text))" in message
    assert "Sample: 3, prompt 'prompt 3', response '3'" in message
    assert list(reward.score_tokens(batch[[0, 1]])["score"]) == [1 / 3, 1 / 2]  # the workers are still there


@pytest.mark.slow
def test_a_number_comes_in_many_forms_a_tensor_among_them(made):
    reward = made(
        """
        import numpy as np
        import torch
        FORMS = [2, True + 1, [2], (2.0,), np.float32(2), np.array([2]), np.array(2), torch.tensor(2),
                 torch.tensor([2.0]), torch.tensor([[2]]), torch.tensor(2.0, requires_grad=True),
                 torch.tensor([2], dtype=torch.bfloat16)]
        def my_reward(prompt, response): return FORMS[int(response)]
        """,
        num_workers=1,
    )
    assert list(reward.score_tokens(batch_of(map(str, range(12))))["score"]) == [2.0] * 12


def test_long_and_odd_texts_arrive_as_they_are_prints_disturb_nothing_and_a_coroutine_is_awaited(made):
    texts = ["a" * 100_000, "", "\ud800 lone", "\x00", "naïve ☃"]
    reward = made(
        """
        import os
        async def my_reward(prompt, response, answer):
            print('x')
            os.write(1, b'y')
            return len(response) if response == answer else -1
        """
    )
    assert list(reward.score_tokens(batch_of(texts))["score"]) == [100_000, 0, 6, 1, 7]


def test_a_failure_that_stops_the_batch_starts_no_worker_for_the_other_samples(tmp_path):
    (tmp_path / "dies.py").write_text(
        "import os, pathlib\npathlib.Path(__file__).with_suffix('.starts').open('a').write('.')\n"
        "def score(prompt, response):\n    os._exit(3)\n"
    )
    with contextlib.closing(FunctionPool(f"{tmp_path}/dies.py:score", {}, 30.0, 1)) as pool:
        first, *others = pool.score([{"prompt": "", "response": ""}] * 20, stop_at_failure=True)
    assert "exit status 3" in first.failure  # type: ignore
    assert others == [None] * 19
    assert len((tmp_path / "dies.starts").read_text()) <= 4


def test_close_ends_every_process_and_may_be_called_again(made, batch):
    reward = made("def my_reward(prompt, response): return 1")
    processes = processes_of(reward)
    assert all(map(is_running, processes))
    reward.close()
    reward.close()
    assert not any(map(is_running, processes))
    with pytest.raises(RewardError, match=r"close\(\) was called"):
        reward.score_tokens(batch)


def test_what_an_interrupted_batch_leaves_under_way_is_ended_and_the_next_batch_is_rated(made, batch):
    reward = made("import time\ndef my_reward(prompt, response): return time.sleep(1000) if response == 'hang' else 1")
    before = processes_of(reward)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            reward.score_tokens(batch_of(["hang"] * 5))
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert not any(map(is_running, before))
    assert list(reward.score_tokens(batch)["score"]) == [1.0] * 5


def test_a_column_that_the_function_needs_and_the_data_lacks_is_named(made, batch):
    with pytest.raises(RewardError, match=r"no column 'solution' in the data\. Its columns: answer"):
        made("def my_reward(prompt, response, solution): return 1").score_tokens(batch)


def test_a_value_that_cannot_travel_leaves_the_other_samples(made):
    columns = DataProto.from_dict(non_tensors={"opaque": [None] * 3 + [1, 2]})
    columns["opaque"][:3] = lambda: 1
    reward = made("def my_reward(prompt, response, opaque): return opaque", on_error="score")
    assert list(reward.score_tokens(batch_of(RESPONSES).union(columns))["score"]) == [0, 0, 0, 1, 2]


def test_a_module_that_only_the_worker_cannot_import_is_named(tmp_path):
    (tmp_path / "rule.py").write_text(
        "import sys\nassert 'torch' in sys.modules, 'not here'\ndef score(prompt, response): return 1\n"
    )
    described = RewardFunction(path=f"{tmp_path / 'rule.py'}:score", per_sample=True)
    with refusal("path", value="not here"):
        described.build(BuildContext())


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"timeout_s": 0.0}, "timeout_s is 0.0: input should be greater than 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan: "),
        ({"num_workers": 0}, "num_workers is 0: "),
        ({"error_score": float("inf")}, "error_score is inf: "),
        ({"on_error": "score", "per_sample": False}, r"on_error is score: .* Set per_sample=true"),
        ({"num_workers": 1, "per_sample": False}, r"num_workers is 1: without per_sample a batch is one call"),
        ({"num_workers": 4, "per_sample": False}, r"num_workers is 4: without per_sample a batch is one call"),
        ({"on_error": "ignore"}, "on_error is 'ignore': input should be 'raise' or 'score'"),
        ({"kwargs": {"prompt": 1}}, r"kwargs\.prompt: the function already receives an argument of this name"),
    ],
)
def test_settings_that_cannot_be_are_faults(settings, fault, tmp_path):
    (tmp_path / "rule.py").write_text("def score(prompt, response, prompts=0, responses=0): return 1")
    with pytest.raises(ConfigError, match=fault):
        RewardFunction(**{"path": f"{tmp_path / 'rule.py'}:score", "per_sample": True, **settings})  # type: ignore[arg-type]


def test_a_function_of_batches_is_refused_for_samples(tmp_path):
    (tmp_path / "rule.py").write_text("def score(prompts, responses): return [1]")
    with pytest.raises(
        ConfigError, match=r"has no argument `prompt`\. It is called with prompt=, response= and columns"
    ):
        RewardFunction(path=f"{tmp_path / 'rule.py'}:score", per_sample=True)


def states(pids):
    return {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    while states([pid])[pid] != "T":
        time.sleep(0.005)


@pytest.mark.parametrize("size", [1, *exhaustive(1_000_000)])  # a socket holds the one, and not the other
def test_a_worker_that_was_stopped_while_it_waited_is_made_anew_and_costs_no_sample(size, made):
    reward = made("def my_reward(prompt, response): return len(response)", num_workers=2, timeout_s=0.5)
    before = processes_of(reward)
    for pid in before:
        stop(pid)
    assert list(reward.score_tokens(batch_of(["a" * size] * 3))["score"]) == [size] * 3
    assert not any(map(is_running, before))


def test_a_worker_that_is_made_anew_refuses_a_file_that_was_edited_meanwhile(made, batch, tmp_path):
    reward = made("def my_reward(prompt, response): return 1.0", num_workers=1)
    (tmp_path / "reward.py").write_text("def my_reward(prompt, response): return 2.0")
    assert list(reward.score_tokens(batch)["score"]) == [1.0] * 5
    os.kill(processes_of(reward)[0], signal.SIGKILL)
    with pytest.raises(RewardError, match=r"reward\.py:my_reward.* its file was changed during the run\. Restore it"):
        reward.score_tokens(batch)
