"""Trackio and MLflow, offline and with the real packages, which the extras `trackio` and `mlflow` install."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import socket
from pathlib import Path

import pytest

from verl.component import BuildContext
from verl.errors import ConfigError
from verl.tracking.base import Tracker, Trackers
from verl.tracking.mlflow import MLflow
from verl.tracking.trackio import Trackio


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture
def trackio_dir(tmp_path_factory, monkeypatch) -> Path:
    directory = tmp_path_factory.mktemp("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(directory))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio, trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", directory)
    return directory


@pytest.fixture
def offline(monkeypatch) -> list:
    """Addresses that were connected to."""
    connected: list = []
    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda self, to: connected.append(to) or connect(self, to))
    return connected


def record(running: Tracker, run_dir: Path, step: int) -> None:
    config = {"_target_": "verl", "actor": {"lr": 0.5, "betas": [0.9, 0.95]}, "api_key": "abcdefgh", "long": "x" * 9000}
    running.start("project/first", config, run_dir, 4)
    running.log({"reward/mean": 0.25, "actor/loss": math.nan}, step)
    running.evaluation({"eval/mean@4": 0.75}, step)
    running.samples([{"prompt": "1+1=", "response": "</script>\u202e", "ids": [1, 2]}], step, "eval")


@needs("trackio")
def test_a_resumed_run_continues_its_trackio_run_without_network(trackio_dir, offline, tmp_path, caplog, capsys):
    state = random.getstate()
    running = Trackers(more={"trackio": Trackio(project="sums")}).build(BuildContext())
    record(running, tmp_path, 1)
    identity = running.identity()
    running.close("stopped")
    resumed = Trackers(more={"trackio": Trackio(project="other")}).build(BuildContext())
    resumed.resume(json.loads(json.dumps(identity)))
    record(resumed, tmp_path, 2)
    assert resumed.identity() == identity
    resumed.close()
    assert (random.getstate(), offline, caplog.records, capsys.readouterr().out) == (state, [], [], "")

    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    assert trackio.context_vars.current_run.get() is None
    assert SQLiteStorage.get_projects() == ["sums"]
    assert SQLiteStorage.get_runs("sums") == [identity["trackio"]["name"]]
    lines = SQLiteStorage.get_logs("sums", identity["trackio"]["name"])
    assert [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line] == [(1, 0.25), (2, 0.25)]
    assert [line["eval/mean@4"] for line in lines if "eval/mean@4" in line] == [0.75, 0.75]
    assert "</script>" in json.dumps(lines)
    stored = b"".join(file.read_bytes() for file in trackio_dir.rglob("*") if file.is_file())
    assert b"abcdefgh" not in stored


@needs("mlflow")
def test_a_resumed_run_continues_its_mlflow_run_without_network(offline, tmp_path, caplog):
    state, uri = random.getstate(), (tmp_path / "store").as_uri()
    running = Trackers(more={"mlflow": MLflow(experiment="sums", tracking_uri=uri)}).build(BuildContext())
    record(running, tmp_path, 1)
    identity = running.identity()
    running.close("interrupted")

    from mlflow import MlflowClient

    client, run_id = MlflowClient(tracking_uri=uri, registry_uri=uri), identity["mlflow"]["run_id"]
    assert client.get_run(run_id).info.status == "KILLED"
    resumed = Trackers(more={"mlflow": MLflow(experiment="sums", tracking_uri=uri)}).build(BuildContext())
    resumed.resume(json.loads(json.dumps(identity)))
    record(resumed, tmp_path, 2)
    assert client.get_run(run_id).info.status == "RUNNING"
    resumed.close()
    assert (random.getstate(), offline, caplog.records) == (state, [], [])

    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == ("project/first", "FINISHED")
    assert (run.data.params["actor.lr"], run.data.params["api_key"]) == ("0.5", "***")
    assert len(run.data.params["long"]) == 6000
    assert [(x.step, x.value) for x in client.get_metric_history(run_id, "reward/mean")] == [(1, 0.25), (2, 0.25)]
    assert [x.value for x in client.get_metric_history(run_id, "eval/mean_at_4")] == [0.75, 0.75]
    assert {x.path for x in client.list_artifacts(run_id, "samples")} == {f"samples/eval_step_{n}.json" for n in (1, 2)}
    elsewhere = Trackers(more={"mlflow": MLflow(tracking_uri=(tmp_path / "elsewhere").as_uri())}).build(BuildContext())
    elsewhere.resume(identity)
    record(elsewhere, tmp_path, 1)
    assert elsewhere.identity()["mlflow"]["run_id"] != run_id
    assert "a new run begins" in caplog.text


@needs("mlflow")
def test_metrics_that_mlflow_refused_are_sent_later_or_counted_as_lost(tmp_path, caplog):
    store = tmp_path / "store"
    running = Trackers(more={"mlflow": MLflow(tracking_uri=store.as_uri())}).build(BuildContext())
    running.start("first", {}, tmp_path, 3)
    running.log({"a": 1.0}, 1)
    away = store.rename(tmp_path / "away")
    running.log({"a": 2.0}, 2)
    assert "tracker.mlflow FAILED, training goes on" in caplog.text
    away.rename(store)
    running.log({"a": 3.0}, 3)
    running.close()
    assert "failed 1 times and lost no record" in caplog.text

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store.as_uri(), registry_uri=store.as_uri())
    (run,) = client.search_runs([x.experiment_id for x in client.search_experiments() if x.name == "verl"])
    assert [x.value for x in client.get_metric_history(run.info.run_id, "a")] == [1.0, 2.0, 3.0]


@needs("mlflow")
def test_a_server_that_does_not_answer_refuses_the_start_soon(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        running = Trackers(more={"mlflow": MLflow(tracking_uri=address, timeout_s=1)}).build(BuildContext())
        with pytest.raises(ConfigError, match="tracker.mlflow could not start"):
            running.start("first", {}, tmp_path, 1)


@pytest.mark.parametrize(("name", "kind"), [("trackio", Trackio()), ("mlflow", MLflow())])
def test_without_its_package_a_tracker_is_refused_with_the_extra(name, kind, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    (fault,) = Trackers(more={name: kind}).machine_faults()
    assert f"tracker.{name}=null" in fault
    assert f'pip install "verl[{name}]"' in fault
