"""`verl serve-training` as a command: it says where it listens, serves the SDK, and ends with Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from on_use import OnUse
from service.test_http_service import adam, datum
from typer.testing import CliRunner

from verl.cli.main import app
from verl.cli.serve_training import PLANNED_RANK


@pytest.mark.slow
def test_the_command_serves_the_sdk_until_ctrl_c(dir32, tmp_path):
    words = ["serve-training", "actor=pretrained", f"actor.model.path={dir32}", "--port", "0", "--name", "small"]
    command = [sys.executable, "-m", "verl.cli", *words, "--dir", str(tmp_path / "saved")]
    environment = os.environ | {"VERL_SERVICE_KEY": "tml-own", "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as serving:
        try:
            assert serving.stdout is not None
            line = next(line for line in serving.stdout if " at http" in line)
            url = line.split(" at ")[1].split(",")[0]
            service = OnUse("tinker").ServiceClient(base_url=url, api_key="tml-own")
            client = service.create_lora_training_client("small", rank=2).result()
            client.forward_backward([datum([5, 6, 7])], "cross_entropy")
            assert client.optim_step(adam(1e-3)).result().metrics["grad_norm"] > 0
            client.save_state("kept").result()
        finally:
            serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 0
    assert list((tmp_path / "saved").glob("*/weights/kept/session.json"))


@pytest.mark.first_rows(3)
@pytest.mark.parametrize(
    ("words", "path", "key"),
    [
        (["--host", "0.0.0.0"], "--host is 0.0.0.0", ""),
        (["--port", "USED"], "--port is", ""),
        (["port=USED"], "--port is", ""),
        (["port=x"], "port is 'x'", ""),
        (["port=99999"], "port is 99999", ""),
        (["--port", "0"], "VERL_SERVICE_KEY does not begin with tml-", "secret"),
        (["rollout=server", "rollout.endpoint.base_url=http://127.0.0.1:1"], "rollout is ServerRollout", ""),
        (["actor.model.pth=x"], "actor.model.pth", ""),
    ],
)
def test_what_it_cannot_serve_is_refused(words, path, key, monkeypatch):
    monkeypatch.setenv("VERL_SERVICE_KEY", key)
    with socket.create_server(("127.0.0.1", 0)) as used:
        words = [word.replace("USED", str(used.getsockname()[1])) for word in words]
        result = CliRunner().invoke(app, ["serve-training", *words])
    assert result.exit_code == 2, result.output
    assert path in result.output


@pytest.mark.slow
def test_its_plan_counts_a_micro_batch_and_each_further_adapter(dir32):
    words = ["actor=pretrained", f"actor.model.path={dir32}", "rollout.max_new_tokens=16"]
    result = CliRunner().invoke(app, ["serve-training", *words, "--plan"])
    assert result.exit_code == 0, result.output
    assert "update" in result.output
    assert f"adapter of rank {PLANNED_RANK}" in result.output
