"""A W&B run without a key is a set of offline files below the run directory."""

import dataclasses
import json
import os
import random
import struct
import subprocess
import sys
import time

import psutil
import pytest
from cluster.processes_of import wait_until_gone

from verl.component import BuildContext
from verl.tracking.base import Trackers
from verl.tracking.wandb import WandB, wandb_mode


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def records(run_dir) -> list:
    """All records of the one offline run below `run_dir`.

    The file is a LevelDB log: after 7 bytes of W&B, blocks of 32 KiB with fragments of checksum, length, kind and data;
    kinds 1 and 4 end a record.
    """
    from wandb.proto import wandb_internal_pb2

    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    data, at, record, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too short for a fragment: zeros up to the next block
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(record))  # type: ignore
            record = b""
    return found


def test_an_offline_run_holds_metrics_config_and_samples(tmp_path, no_key):
    running = Trackers(wandb=WandB(project="arithmetic", tags=["a"])).build(BuildContext())  # type: ignore
    running.start("first", {"actor": {"lr": 0.5}, "api_key": "abcdefgh"}, tmp_path, 2)
    running.log({"reward/mean": 0.25}, 1)
    running.log({"reward/mean": 0.5}, 2)
    running.evaluation({"eval/accuracy": 0.75}, 1)
    running.samples([{"prompt": "1+1=", "response": "2"}, {"prompt": "x", "score": 1.0}], 2, "eval")
    running.close()
    running.close()

    found = records(tmp_path)
    run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, list(run.tags)) == ("arithmetic", "first", ["a"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["actor"] == {"lr": 0.5}
    assert config["api_key"] == "***"
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    values = [(row["step"], row.get("reward/mean"), row.get("eval/accuracy")) for row in rows]
    assert values == [(1, 0.25, None), (2, 0.5, None), (1, None, 0.75), (2, None, None)]
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples/*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["prompt", "response", "score"],
        "data": [["1+1=", "2", None], ["x", None, 1.0]],
    }
    exits = [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"]
    assert exits == [0]


def test_without_a_key_the_mode_is_offline_and_a_key_makes_it_online(monkeypatch, tmp_path, no_key):
    assert wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    assert wandb_mode("auto") == "online"
    (tmp_path / "netrc").write_text("machine elsewhere login user password 0123\n")
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode("auto") == "offline"
    assert wandb_mode("online") == "online"


def run_record(run_dir):
    return next(record.run for record in records(run_dir) if record.WhichOneof("record_type") == "run")


def tracked(settings: WandB, run_dir, former=None, lineage=None):
    """A run of one step that goes on from what `former` was; gives its identity and its offline record."""
    running = Trackers(wandb=settings).build(BuildContext())
    if former is not None:
        running.resume(former)
    running.start("name", {"lineage": lineage}, run_dir, 1)
    identity = running.identity()
    running.log({"reward/mean": 0.5}, 1)
    running.close()
    return identity, run_record(run_dir)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_wandb_run(tmp_path, no_key):
    first, before = tracked(WandB(), tmp_path / "first")
    assert first == {"wandb": {"id": before.run_id, "root": before.run_id}}
    second, now = tracked(WandB(), tmp_path / "second", first)
    assert now.run_id == before.run_id
    assert second == first


@pytest.mark.slow
def test_the_id_is_kept_in_the_checkpoint_and_found_by_the_run_that_goes_on(model32, tmp_path, no_key):
    from trainer.runs import GRPO_ALGORITHM, ppo_run

    from verl.checkpoint.config import Checkpointing

    ids = []
    for name, resume in (("first", None), ("second", "latest")):
        run = ppo_run(
            model32, GRPO_ALGORITHM, total_steps=2, stop_after=1, tracker=Trackers(wandb=WandB()), save_final=False
        )
        saving = Checkpointing(save_dir=str(tmp_path / "checkpoints"), save_async=False)
        with dataclasses.replace(run, checkpoint=saving, resume=resume).build(
            BuildContext(run_dir=tmp_path / name)
        ) as trainer:
            trainer.fit()
        ids.append(run_record(tmp_path / name).run_id)
        state = json.loads((tmp_path / "checkpoints/latest/trainer_state.json").read_text())
        assert state["trackers"] == {"wandb": {"id": ids[0], "root": ids[0]}}
    assert ids[0] == ids[1]


KILLED = """
import sys, time
from pathlib import Path
from verl.component import BuildContext
from verl.tracking.base import Trackers
from verl.tracking.wandb import WandB

running = Trackers(wandb=WandB()).build(BuildContext())
running.start("stopped", {}, Path(sys.argv[1]), 2)
running.log({"reward/mean": 0.25}, 1)
print("logged", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_wandb_leaves_nothing_of_a_run_that_is_killed(tmp_path, no_key):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "logged\n"  # type: ignore
    (service,) = [child.pid for child in psutil.Process(run.pid).children() if "wandb-core" in child.name()]
    assert list(temporary.iterdir())
    run.kill()
    run.communicate()
    assert wait_until_gone([service]) == []
    end = time.monotonic() + 60
    while list(temporary.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []


def test_the_retries_of_wandb_draw_from_a_generator_of_their_own(tmp_path, no_key):
    """Its threads wait by chance while training goes on."""
    from wandb.sdk.lib import retry

    tracked(WandB(mode="offline"), tmp_path / "run")
    assert isinstance(retry.random, random.Random)  # type: ignore
