"""A benchmark that is cut short keeps the legs that it has finished; the work that all measure is what they say."""

import ast
import importlib.util
import json
import threading
import time
from pathlib import Path

import pytest
import torch

from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.responses import ResponseGenerator

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def module(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name.strip('_')}", BENCHMARKS / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def progress():
    return module("_progress")


@pytest.fixture
def run(tmp_path, monkeypatch):
    found = module("run")
    monkeypatch.setattr(found, "HERE", tmp_path)
    return found


def script(directory, *lines):
    (directory / "legs.py").write_text("\n".join(["import sys, time", *lines]))


def test_a_benchmark_beyond_its_time_is_ended_and_its_last_line_kept(run, tmp_path, monkeypatch):
    class AfterTheLines(threading.Timer):
        """Its time begins once the lines are there."""

        def run(self):
            while not (tmp_path / "told").exists() and not self.finished.is_set():
                time.sleep(0.01)
            super().run()

    monkeypatch.setattr(run.threading, "Timer", AfterTheLines)
    told = f"""open({str(tmp_path / "told")!r}, "w")"""
    script(tmp_path, """print('{"rows": [1]}')""", """print('{"rows": [1, 2]}', flush=True)""", told, "time.sleep(600)")
    assert run.measured("legs", limit_s=0.1) == {"rows": [1, 2], "is_complete": False}


def test_one_that_ends_in_time_is_kept_as_it_is_and_is_told_its_case(run, tmp_path):
    script(tmp_path, "import json", "print(json.dumps({'asked': sys.argv[1:]}))")
    assert run.measured("legs:one", limit_s=60) == {"asked": ["--cases", "one"]}


def test_one_that_fails_before_its_first_leg_gives_nothing(run, tmp_path):
    script(tmp_path, "sys.exit(3)")
    assert run.measured("legs", limit_s=60) is None


def test_rounds_end_when_the_time_of_their_leg_is_up_but_three_are_measured(progress, capsys):
    assert list(progress.Progress("legs", {}, 0).rounds("first", 9)) == [0, 1, 2, 3]
    assert list(progress.Progress("legs", {}, 3600).rounds("first", 9, legs_left=2)) == list(range(10))
    assert "first: its time is up after 3 rounds" in capsys.readouterr().err


def test_each_line_says_whether_it_is_the_last(progress, capsys):
    told = progress.Progress("legs", {"threads": 2}, 1)
    told.publish({"a": 1}, [["x", "y", "z"]], is_complete=False)
    line = json.loads(capsys.readouterr().out)
    assert line == {
        "benchmark": "legs",
        "threads": 2,
        "is_complete": False,
        "found": {"a": 1},
        "rows": [["x", "y", "z"]],
    }


@pytest.mark.parametrize("ends", [True, False])
def test_responses_of_the_workload_have_the_lengths_that_were_prescribed(tmp_path, ends):
    workload = module("_workload")
    workload.write_model(tmp_path, hidden=16, layers=1, context=64)
    source = Pretrained(path=str(tmp_path))
    lengths = [3, 1, 5, 2, 5, 4]
    rollout, tokenizer = workload.forced_rollout(lengths, ends, 2), source.load_tokenizer()
    engine = rollout.attach(source.load_causal_lm("cpu"), tokenizer, seed=0)
    sampler = ResponseGenerator(engine, rollout, tokenizer.pad_token_id)
    prompts = DataProto.from_dict(
        {
            "prompts": torch.tensor([[3, 4], [5, 6], [7, 8]]),
            "prompt_mask": torch.ones(3, 2, dtype=torch.bool),
            "prompt_ids": torch.arange(3),
            "group_ids": torch.arange(3),
        }
    )
    drawn = sampler.generate(prompts, GenerationRequest(1, 2))["response_mask"].sum(dim=1).tolist()
    assert drawn == (lengths if ends else [max(lengths)] * 6)


def test_a_step_of_grpo_asks_the_reward_once_and_calls_each_role_as_often_as_it_must():
    counted = module("driver_traffic").counted_step(processes=1)
    calls = {"actor.generate": 1, "actor.compute_log_probs": 1, "reference.compute_log_probs": 1}
    assert counted["calls_by_method"] == {**calls, "actor.update": 2, "actor.sync": 1}
    assert counted["rewarded"] == 1
    assert counted["unions"] <= 9  # 11 before those of one stage were made in one
    assert "sent_bytes" not in counted  # roles of this process are called, not sent to


def test_the_update_of_distillation_holds_a_chunk_of_logits_however_many_tokens_there_are(monkeypatch):
    vocabulary, few, many = 16_384, 256, 1024
    monkeypatch.setattr("verl.engines.chunked_logprobs.LOGITS_AT_A_TIME", 64 * vocabulary)
    less, more = (module("distill_memory").peaks(vocabulary, tokens) for tokens in (few, many))
    for way in ("teacher", "update"):
        assert more[way]["largest"] == less[way]["largest"] == 4 * 64 * vocabulary
    added_logits = 4 * (many - few) * vocabulary
    assert more["update"]["peak"] - less["update"]["peak"] < 0.25 * added_logits  # the rest of the model
    assert more["all logits"]["peak"] - less["all logits"]["peak"] > 5 * added_logits  # it is seen where it is held


FILES = sorted(BENCHMARKS.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_what_a_benchmark_imports_of_torch_and_verl_is_there(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("torch", "verl"):
            imported = importlib.import_module(node.module)
            for name in node.names:
                is_module = hasattr(imported, "__path__") and importlib.util.find_spec(f"{node.module}.{name.name}")
                assert hasattr(imported, name.name) or is_module, f"{node.module} has no {name.name}"
