"""What does not answer, refuses, or is another training's is told before anything is trained, and nothing is left."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli.small_runs import small_run
from omegaconf import OmegaConf
from refusals import refusal
from storage.s3_server import Fault
from trainer.state.test_save_directory import OTHER, fit, run

from verl.checkpoint import ownership
from verl.checkpoint.core.checkpoint import read_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.ownership import Owner
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import refuse_here, validate
from verl.storage.config import LocalStorage, S3Storage

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


REFUSED = {  # what is given, and the value that the fault shows
    "rollout.endpoint.base_url": (["rollout=server", f"rollout.endpoint.base_url={NOBODY}"], NOBODY),
    "reward.endpoint.base_url": (["reward=remote_http", f"reward.endpoint.base_url={NOBODY}"], NOBODY),
    "storage": (["storage=s3", "storage.bucket=verl-tests", f"storage.endpoint_url={NOBODY}"], "s3"),
    "trainer.placement.address": (["trainer=ray", "trainer.placement.address=127.0.0.1:9"], "127.0.0.1:9"),
    "reward.path": (["reward=function", "reward.path=math:nope"], "math:nope"),
    "checkpoint.save_dir": (["checkpoint.save_dir=/proc/nowhere"], "/proc/nowhere"),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_there_is_refused_by_its_key_before_anything_is_trained(path, tmp_path, s3_url):
    overrides, value = REFUSED[path]
    options = [text for text in overrides if "." not in text.partition("=")[0]]
    config = compose_root("ppo", options)
    for text in overrides:
        if text not in options:
            OmegaConf.update(config, *text.split("=", 1))
    with refusal(path, value=value, varies="address" in path):  # it tells of a token of Ray, if there is one
        refuse_here(validate(config), BuildContext())
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "method"),
    [
        pytest.param(404, "GET", marks=pytest.mark.exhaustive),
        pytest.param(403, "GET", marks=pytest.mark.exhaustive),
        (403, "PUT"),
    ],
)
def test_a_store_that_refuses_to_list_or_to_take_is_told(status, method, model32, proxy, tmp_path):
    code = {404: b"NoSuchBucket", 403: b"AccessDenied"}[status]
    body = b"<Error><Code>" + code + b"</Code></Error>"
    proxy.misbehave = lambda request: Fault(status=status, body=body) if request.method == method else None
    storage = S3Storage(bucket="verl-tests", endpoint_url=proxy.url)
    for resume in (None, "latest"):
        with refusal("storage"):
            refuse_here(run(model32, storage=storage, resume=resume))
    assert not [*tmp_path.iterdir()]


def test_another_training_is_refused_by_its_keys_before_anything_is_built(model32, tmp_path):
    storage = LocalStorage(path=str(tmp_path / "bucket"))
    directory = fit(run(model32, storage=storage))
    before = sorted(tmp_path.rglob("*"))
    elsewhere = f"file://{storage.path}/checkpoints/verl/default"
    for resume in ("latest", str(directory), str(directory / "global_step_2"), elsewhere):
        with refusal("data.train", *(["resume"] if resume == "latest" else [])):
            refuse_here(run(model32, data=OTHER, resume=resume, storage=storage))
        refuse_here(run(model32, resume=resume, storage=storage))
    with refusal("checkpoint.save_dir", value=directory):
        refuse_here(run(model32, data=OTHER, save={"save_dir": str(directory)}))
    refuse_here(run(model32, data=OTHER, experiment_name="other"))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.exhaustive
def test_a_job_of_a_sweep_that_finds_only_another_training_is_refused_before_anything_is_built(model32, tmp_path):
    job, new = (BuildContext(job="job_1", swept=(f"actor.optimizer.lr={lr}",)) for lr in (1e-3, 2e-3))
    fit(run(model32, lr=1e-3), "job_0", job.swept)
    before = sorted(tmp_path.rglob("*"))
    with refusal("data.train", "resume"):
        refuse_here(run(model32, lr=1e-3, data=OTHER, resume="latest"), job)
    refuse_here(run(model32, lr=1e-3, resume="latest"), job)
    refuse_here(run(model32, lr=2e-3, data=OTHER, resume="latest"), new)  # a job that the first sweep did not have
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_of_a_store_that_a_living_run_of_another_machine_holds_is_refused_before_anything_is_built(
    model32, tmp_path, monkeypatch
):
    storage = LocalStorage(path=str(tmp_path / "bucket"))
    directory = fit(run(model32, storage=storage))
    identity = read_state(FileSystem(), CheckpointDirectory(directory).open("global_step_2"))["identity"]
    place = dataclasses.replace(storage, path=f"{storage.path}/checkpoints/verl/default")
    held = ownership.StoreLease(place, Owner.here("first", identity))
    monkeypatch.setattr(ownership, "machine_id", lambda: "this machine")
    for name in ("RENEW_EVERY_S", "LOOK_EVERY_S"):
        monkeypatch.setattr(ownership, name, 0.05)
    living = [run(model32, storage=storage, resume=resume) for resume in (None, "latest", f"{directory}/global_step_2")]
    for made in living:
        refuse_here(made)
    assert held.acquire() is None
    held.keep()
    try:
        shutil.rmtree(directory.parent)
        for made in living[:2]:
            with refusal("storage"):
                refuse_here(made)
        refuse_here(run(model32, storage=storage, data=OTHER, experiment_name="other"))
    finally:
        held.release()
    refuse_here(living[1])
    assert not directory.exists()


@pytest.mark.exhaustive
def test_a_disk_with_a_checkpoint_goes_on_without_its_store(model32, tmp_path):
    fit(run(model32))
    gone = S3Storage(bucket="verl-tests", endpoint_url=NOBODY, retries=0)
    refuse_here(run(model32, storage=gone, resume="latest"))


def read_only(directory: Path) -> list[str]:
    """The words before a command to which a directory is on a read-only disk; none where nobody may mount, and it is
    then made unwritable."""
    directory.mkdir()
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    words += ['mount -t tmpfs -o ro none "$0" && exec "$@"', str(directory)]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
        return words
    directory.chmod(0o555)
    return []


@pytest.mark.exhaustive
def test_the_script_says_it_in_a_line_prints_no_configuration_and_leaves_no_directory(
    model32, tmp_path, tmp_path_factory
):
    aside = tmp_path_factory.mktemp("aside")
    mounted = read_only(aside / "saved")
    given = [*small_run(model32, tmp_path), "actor.model.path=warm-start://sft_warmup"]
    given += ["rollout=server", f"rollout.endpoint.base_url={NOBODY}", f"checkpoint.save_dir={aside}/saved/here"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VERL_CACHE": str(aside / "cache")}
    script = [*mounted, sys.executable, ROOT / "main_ppo.py", *given]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    said = done.stdout + done.stderr
    assert "rollout.endpoint.base_url is http://127.0.0.1:9: no server answers there" in said
    assert f"checkpoint.save_dir leads to {aside}/saved/here: it cannot be written (" in said
    assert len(said.splitlines()) <= 4, said
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["rate.py"], json.dumps([*map(str, tmp_path.rglob("*"))])
