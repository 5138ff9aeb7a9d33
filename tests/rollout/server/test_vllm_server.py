"""`rollout=server` against vLLM's own server, on loopback."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from random_models import save_random_model
from roles import experience, start_actor
from rollout.speaking import gap
from trainer.runs import GRPO_ALGORITHM, JSONL, fit, ppo_run, read_lines

from verl.http_client.endpoint import Endpoint
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.rollout.base import GenerationRequest
from verl.rollout.engine_process.process import EngineFiles
from verl.rollout.server.config import ServerRollout
from verl.utils.orphan_cleanup import CLEANUP

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.xdist_group("vllm server"),
]
ROOT = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Heads of 32, the narrowest that vLLM's attention takes on a CPU."""
    path = save_random_model(tmp_path_factory.mktemp("served") / "model", "qwen2", torch.float32, hidden_size=128)
    return Pretrained(path=str(path))


@pytest.fixture(scope="module")
def address(model, tmp_path_factory):
    """A vLLM server of the model, for all tests of the module."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    log = tmp_path_factory.mktemp("served") / "server.log"
    command = [sys.executable, str(Path(__file__).with_name("vllm_server.py")), "--model", model.path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "64", "--max-num-seqs", "32", "--max-num-batched-tokens", "2048"]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    files = EngineFiles()
    variables |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)} | files.variables()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=os.environ | variables, stdout=out, stderr=out, cwd=ROOT, start_new_session=True
        )
    CLEANUP.register(process_groups=[process.pid])
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # a group of its own: its workers end with it
        process.wait()
        files.remove()


def _wait_for(url, process, log):
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.25)
    raise AssertionError(log.read_text()[-4000:])


@pytest.fixture
def attached(address, model):
    with ExitStack() as ending:

        def start(actor=None, **options):
            rollout = ServerRollout(endpoint=Endpoint(base_url=address), **{"max_new_tokens": 6, **options})
            made = start_actor(model, rollout, **(actor or {}))
            ending.callback(made.close)
            return made

        yield start


@pytest.mark.exhaustive
def test_log_probs_are_the_trainers_and_a_seed_draws_the_same_again(attached, prompts):
    actor = attached()
    assert actor.generator.engine.row_tokens == 64
    rows = actor.generate(prompts(), GenerationRequest(0, 4))
    assert gap(actor, rows) < 1e-4
    assert len({tuple(row.tolist()) for row in rows["responses"]}) > 8
    assert torch.equal(rows["responses"], actor.generate(prompts(), GenerationRequest(0, 4))["responses"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("actor", [{}, {"lora": LoRA(rank=2)}], ids=["whole", "adapter"])
def test_it_follows_the_trained_weights_and_proves_it(actor, attached, prompts):
    actor = attached(actor)
    before = actor.generate(prompts(), GenerationRequest(0, 2))
    actor.update(experience(actor, prompts()))
    assert gap(actor, before) > 1e-4
    assert actor.sync().metrics["sync/probe_gap_nats"] < 1e-4
    assert gap(actor, actor.generate(prompts(), GenerationRequest(0, 2))) < 1e-4


@pytest.mark.exhaustive
def test_a_stop_token_belongs_to_its_response(attached, prompts):
    stops = tuple(range(20, 60))
    rows = attached(stop_token_ids=stops, min_new_tokens=2).generate(prompts(), GenerationRequest(0, 4))
    lengths = rows["response_mask"].sum(dim=1)
    last = rows["responses"][torch.arange(len(rows)), lengths - 1]
    ended = torch.isin(last, torch.tensor([1, *stops]))  # 1 is the model's own <eos>
    assert ended.any()
    assert (lengths[~ended] == 6).all()
    assert int(lengths.min()) >= 2


def steps_without_gap(run, run_dir):
    """The metrics of both steps of a run, in which the server has the trainer's log-probs."""
    fit(run, run_dir)
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if "reward/mean" in line]
    assert len(lines) == 2
    assert all(line["rollout/log_prob_gap_nats"] < 1e-4 for line in lines)
    return lines


@pytest.mark.exhaustive
def test_a_run_trains_on_what_it_draws(address, model, tmp_path):
    run = ppo_run(
        model,
        GRPO_ALGORITHM,
        rollout=ServerRollout(endpoint=Endpoint(base_url=address), max_new_tokens=7),
        total_steps=2,
        tracker=JSONL,
    )
    assert all(line["sync/probe_gap_nats"] < 1e-4 for line in steps_without_gap(run, tmp_path))
