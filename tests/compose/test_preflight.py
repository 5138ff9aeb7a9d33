"""What does not answer, refuses, or is another training's is told before anything is trained, and nothing is left."""

import dataclasses
import shutil
import sys

import pytest
from omegaconf import OmegaConf
from refusals import refusal
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


def test_a_file_in_the_place_of_a_directory_of_the_store_is_found_before_the_first_save(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/staging").write_text("in the way")
    with refusal("checkpoint.save_dir", value="not a directory"):
        refuse_here(validate(compose_root("ppo", ["++checkpoint.save_dir=saved"])))


def test_a_run_with_ray_is_planned_where_ray_is_not_installed_and_refused_before_it_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    run = validate(compose_root("ppo", ["trainer=ray"]))
    with refusal("trainer.placement.address", value="Ray"):
        refuse_here(run)


@pytest.mark.slow
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


@pytest.mark.slow
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
