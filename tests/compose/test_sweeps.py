"""A sweep ends with one table of its jobs, on the terminal, as CSV and as a picture."""

import csv
import json
import os

import pytest
from cli.small_runs import small_run
from hydra import compose, initialize_config_dir
from hydra.types import RunMode
from omegaconf import open_dict

from verl.compose import schema
from verl.compose.overrides import swept_overrides
from verl.compose.schema import conf_dir, group_options
from verl.compose.validate import validate
from verl.tracking.sweep_table import outcomes, table, write

ROOT = conf_dir().parent


@pytest.mark.slow
def test_the_jobs_of_a_sweep_are_compared(fork_server, tmp_path, model64):
    arguments = [*small_run(model64, tmp_path), "trainer.total_steps=2", "checkpoint.save_interval=1", "tracker=wandb"]
    environment = {**os.environ, "WANDB_MODE": "offline", "COLUMNS": "80"}
    words = [ROOT / "main_ppo.py", "-m", "checkpoint=sync,async", *arguments]
    done = fork_server.run(words, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert "Sweep of 2 jobs" in done.stdout
    (directory,) = tmp_path.glob("multirun/verl/*/*")
    head, *rows = list(csv.reader((directory / "sweep.csv").open()))
    assert head[:3] == ["job", "checkpoint", "status"]
    assert [row[:3] for row in rows] == [["0", "sync", "finished"], ["1", "async", "finished"]]
    for column in ("step (s)", "tokens/s", "peak memory of a process (MiB)", "save stall (s)", "checkpoint (MiB)"):
        assert all(float(row[head.index(column)]) > 0 for row in rows), column
    assert rows[0][head.index("last reward")] == rows[1][head.index("last reward")]  # the same training
    groups = [file.read_bytes() for file in directory.glob("*/wandb/offline-run-*/run-*.wandb")]
    assert len(groups) == 2
    assert all(directory.name.encode() in record for record in groups)  # the group of both
    assert head[-1] == "W&B run"
    assert all((directory / row[-1]).match(f"{row[0]}/wandb/offline-run-*") for row in rows)
    assert all((directory / row[-1]).is_dir() for row in rows)
    lines = done.stdout[done.stdout.index("Sweep of 2 jobs") :].splitlines()
    assert all(len(line) <= 80 for line in lines[:4])
    assert {"job", "checkpoint", "status", "accuracy"} <= set(lines[1].split())


@pytest.mark.parametrize("option", group_options()["sweep"])
def test_a_sweep_file_makes_a_multirun_of_it(option):
    config = compose_hydra(f"sweep={option}")
    assert config.hydra.mode == RunMode.MULTIRUN
    assert any("," in str(values) for values in config.hydra.sweeper.params.values())


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("sharding", "processes"), [("none", 1), ("ddp", 2), ("fsdp", 2), ("tp", 2), ("cp", 2), ("pp", 2)]
)
def test_a_sweep_over_shardings_divides_over_two_processes_what_can_be_divided(sharding, processes):
    config = compose_hydra("sweep=sharding_checkpoint", f"sharding={sharding}")
    assert sharding in config.hydra.sweeper.params.sharding.split(",")
    with open_dict(config):
        del config.hydra
    assert validate(config).trainer.n_gpus_per_node == processes


def compose_hydra(*overrides: str):
    schema.register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("ppo", list(overrides), return_hydra_config=True)


def test_the_address_of_a_wandb_run_is_in_the_table(tmp_path):
    place = {"id": "1a", "url": "https://wandb.ai/me/verl/runs/1a", "directory": str(tmp_path / "0/wandb/run-1a")}
    (tmp_path / "0").mkdir()
    (tmp_path / "0/wandb.json").write_text(json.dumps(place))
    written = write(tmp_path, outcomes(tmp_path))
    assert list(csv.reader(written.open()))[1][-1] == place["url"]


def test_a_job_without_a_result_stands_in_the_table_too(tmp_path):
    for number, rate in enumerate(["1", "2"]):
        job = tmp_path / str(number)
        job.mkdir()
        (job / "overrides.yaml").write_text(f"- ++actor.optimizer.lr={rate}\n- trainer.seed=0\n")
    (tmp_path / "0" / "summary.json").write_text(json.dumps({"status": "failed", "evaluations": {}}))
    assert table(outcomes(tmp_path)) == (
        ["job", "actor.optimizer.lr", "status"],
        [["0", "1", "failed"], ["1", "2", "not run"]],
    )


@pytest.mark.parametrize(
    ("arguments", "params", "job"),
    [
        (["-m", "actor.optimizer.lr=1e-3,2e-3", "trainer.seed=1"], {}, ["actor.optimizer.lr=1e-3"]),
        (["++trainer.seed=range(3)", "algorithm=grpo,rloo"], {}, ["++trainer.seed=0", "algorithm=grpo"]),
        (["+sharding@actor.sharding=ddp,fsdp"], {"trainer.seed": "1"}, ["+sharding@actor.sharding=ddp"]),
        ([], {"trainer.seed": "1,2"}, ["trainer.seed=1"]),
        (["data.files=[a,b]", "trainer.seed=choice(1,2)"], {}, ["trainer.seed=1"]),
    ],
)  # fmt: skip
def test_what_a_sweep_varies_is_read_off_its_command_line_and_its_sweeper(arguments, params, job):
    assert swept_overrides(arguments, {"params": params}, [*job, "trainer.total_steps=2"]) == tuple(job)
