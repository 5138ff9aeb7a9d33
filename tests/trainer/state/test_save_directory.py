"""Whose checkpoints lie where: two runs one after the other, two at once, a sweep repeated, a job started again."""

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import each_value_once, exhaustive
from checkpoint.test_ownership import forked
from refusals import refusal
from storage.s3_server import Fault
from trainer.runs import BRIEF, BRIEF_GRPO, JSONL, PPO_ALGORITHM, Prompts, ppo_run

from verl.checkpoint import ownership
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core import filesystem
from verl.checkpoint.core.checkpoint import read_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.manifest import COMMIT
from verl.checkpoint.ownership import CheckpointInUse, Owner, RunLock, StoreLease
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.retention import Retention, prune
from verl.component import BuildContext
from verl.errors import CheckpointFenced, CheckpointNotFound, ConfigError, NoSpaceForCheckpoint
from verl.storage.config import LocalStorage, S3Storage, Storage
from verl.trainer.state.save_directory import SaveDirectory, SaveDirectoryChoice, job_name, run_dir_faults
from verl.trainer.train_loop import TrainLoop

OTHER = Prompts(train=("1+1=", "2+2=", "3+3=", "4+4="), eval=())


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(model: Any, resume: str | None = None, save: dict[str, Any] | None = None, **options: Any) -> Any:
    """Two steps, each saved, two kept; in `checkpoints/verl/default` unless `save` says otherwise."""
    saving = {"save_interval": 1, "keep_last_n": 2, "save_async": False}
    settings = {"total_steps": 2, "save_final": False, "project_name": "verl", **BRIEF}
    storage = options.pop("storage", None)
    made = ppo_run(model, **{"algorithm": BRIEF_GRPO, **settings, **options})
    return dataclasses.replace(made, checkpoint=Checkpointing(**saving | (save or {})), resume=resume, storage=storage)


def fit(made: Any, job: str = "", swept: tuple[str, ...] = ()) -> Path:
    """Train to the end; where it saved."""
    with made.build(BuildContext(run_dir=Path("outputs", str(time.time_ns())), job=job, swept=swept)) as trainer:
        trainer.fit()
        return trainer.saving.directory


def names(directory: Path | str) -> list[str]:
    return [checkpoint.name for checkpoint in CheckpointDirectory(directory).complete()]


def run_of(directory: Path | str, name: str) -> str:
    return CheckpointDirectory(directory).open(name).manifest.run_id


# -- the run directory ---


@pytest.mark.slow
def test_a_run_directory_in_which_another_run_trained_is_refused_before_anything_is_written(model32, tmp_path):
    context = BuildContext(run_dir=tmp_path / "run")

    def fit_here(**options: Any) -> None:
        with run(model32, tracker=JSONL, **options).build(context) as trainer:
            trainer.fit()

    fit_here(total_steps=1)
    fit_here(resume="latest")  # continues the run that wrote there
    before = {path.name: path.read_bytes() for path in context.run_dir.iterdir() if path.is_file()}  # type: ignore
    elsewhere = run(model32, data=OTHER, save={"save_dir": str(tmp_path / "other")})
    with elsewhere.build(BuildContext(run_dir=tmp_path / "second")) as trainer:
        trainer.fit()
    for second in (
        {},
        {"checkpoint": None},
        {"data": OTHER, "resume": str(tmp_path / "other/global_step_1"), "save": {"save_dir": str(tmp_path / "other")}},
        {"resume": "latest", "save": {"save_dir": str(tmp_path / "empty")}},
    ):
        made = run(model32, **{key: value for key, value in second.items() if key != "checkpoint"})
        made = dataclasses.replace(made, checkpoint=None) if "checkpoint" in second else made
        with pytest.raises(ConfigError, match=r"another run has trained there .*hydra\.run\.dir=DIR.*resume=latest"):
            made.build(context)
        assert before == {path.name: path.read_bytes() for path in context.run_dir.iterdir() if path.is_file()}  # type: ignore
        assert any("trained there" in fault for fault in made.preflight(context))
    assert not (tmp_path / "empty").exists()


def test_a_later_run_of_the_process_that_is_refused_leaves_the_directory_to_the_earlier_one(tmp_path, monkeypatch):
    first = choose(None, run_dir=tmp_path / "run")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/metrics.jsonl").write_text('{"step": 1}\n')
    with refusal("hydra.run.dir"):
        choose(None, run_dir=tmp_path / "trained")
    monkeypatch.setattr(StoreLease, "acquire", lambda self: Owner.here("abcd1234"))
    with pytest.raises(ConfigError, match="abcd1234"):
        choose(None, run_dir=tmp_path / "later", storage=LocalStorage(path="bucket"))
    assert RunLock.held_here(SAVED) is first.lock
    first.release()


@pytest.mark.parametrize(
    ("save_dir", "fault"),
    [(f"a/{300 * 'b'}", "it has a name of more than 255 bytes"), ("link/b", "link is a symbolic link to no directory")],
)
def test_a_directory_that_cannot_be_made_is_refused_before_anything_is(save_dir, fault):
    Path("link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=fault):
        choose(None, settings=Checkpointing(save_dir=save_dir), dry=True)
    assert [path.name for path in Path().iterdir()] == ["link"]


@pytest.mark.parametrize("left", ['{"step": 0, "eval/accuracy": 0.5}\n', '{"step": 1, "re', ""])
def test_a_run_that_ended_before_its_first_step_does_not_own_its_run_directory(left, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(left)
    (tmp_path / "summary.json").write_text('{"status": "failed", "steps": 0}')
    assert not list(run_dir_faults(tmp_path, None, None, tmp_path))
    (tmp_path / "metrics.jsonl").write_text(left + '\n{"step": 1, "reward/mean": 1.0}\n')
    assert list(run_dir_faults(tmp_path, None, None, tmp_path))


def test_a_summary_that_cannot_be_written_does_not_fail_the_run(model32, tmp_path, caplog):
    (tmp_path / "run/summary.json.unfinished").mkdir(parents=True)
    with run(model32, total_steps=1).build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        assert trainer.fit().status == "finished"
    assert "summary.json cannot be written" in caplog.text


# -- whose directory, which checkpoint ----------------------------------------------------------------------------

TRAINER: Any = SimpleNamespace(project_name="verl", experiment_name="default")
SAVED = Path("checkpoints/verl/default")


def saved_step(directory: Path, step: int, seed: int = 1) -> None:
    with CheckpointStore(directory, run_id=f"of seed {seed}").begin(step) as transaction:
        transaction.commit(state={"identity": {"seed": seed}})


def choose(resume: str | None, seed: int = 1, storage: Storage | None = None, **options: Any) -> SaveDirectory:
    """Where a run of the training with this seed may save, and from what it resumes."""
    settings = options.pop("settings", Checkpointing())
    return SaveDirectoryChoice(settings, TRAINER, "", storage, {"seed": seed}, "second").choose(resume, **options)


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(
    ("there", "resume", "outcome"),
    [
        ("", None, None),
        ("", "latest", None),
        ("11", None, None),
        ("11", "latest", 2),
        ("22", None, ("checkpoint.save_dir",)),
        ("22", "latest", ("seed", "resume")),
        ("12", None, ("checkpoint.save_dir",)),
        ("12", "latest", 1),
        ("21", None, None),
        ("11", "checkpoints/verl/default/global_step_1", 1),
        ("12", "checkpoints/verl/default/global_step_2", ("seed",)),
    ],
)
def test_a_run_saves_beside_its_own_training_resumes_its_newest_and_is_refused_beside_another(
    there, resume, outcome, dry
):
    """`there`: seeds of the checkpoints of steps 1 and 2. The check before the run says the same and locks nothing."""
    for step, seed in enumerate(there, 1):
        saved_step(SAVED, step, int(seed))
    before = sorted(Path().rglob("*"))
    if isinstance(outcome, tuple):
        with refusal(*outcome):
            choose(resume, dry=dry)
    else:
        chosen = choose(resume, dry=dry)
        assert (chosen.resumed and chosen.resumed.step) == outcome
        assert (RunLock.held_here(SAVED) is None) == dry
        chosen.release()
    assert RunLock.held_here(SAVED) is None
    assert sorted(Path().rglob("*")) == before


@pytest.mark.slow
def test_a_refusal_names_the_directory_what_differs_and_what_to_do(model32):
    first = fit(run(model32))
    with refusal("checkpoint.save_dir") as refused:
        fit(run(model32, algorithm=PPO_ALGORITHM))
    for said in (f"{first}", "algorithm.advantage._target_, ", "resume=latest", "trainer.experiment_name=NAME"):
        assert said in str(refused.value)
    with refusal("data.train", "resume"):
        fit(run(model32, data=OTHER, resume="latest"))
    assert fit(run(model32, algorithm=PPO_ALGORITHM, experiment_name="other")).name == "other"
    assert fit(run(model32, lr=1e-3, total_steps=4)) == first  # the same training once more, which prunes its own alone
    assert names(first) == ["global_step_1", "global_step_2", "global_step_3", "global_step_4"]


@pytest.mark.exhaustive
def test_a_resumed_run_prunes_those_before_it_of_its_own_descent_and_leaves_the_branch_that_it_abandoned(model32):
    first = fit(run(model32, save={"keep_last_n": None}, total_steps=4, stop_after=3))
    second = fit(run(model32, resume=str(first / "global_step_2"), total_steps=4, lr=1e-3))
    assert second == first
    # 1 and 2 led to the resumed run, 3 did not
    assert names(first) == ["global_step_3", "global_step_3-2", "global_step_4"]
    state = read_state(FileSystem(), CheckpointDirectory(first).open("global_step_4"))
    assert state["lineage"]["ancestors"] == {run_of(first, "global_step_3"): 2}


@pytest.mark.slow
def test_a_wiped_disk_finds_its_own_training_in_the_store_and_leaves_that_of_others(model32, tmp_path):
    storage = LocalStorage(path=str(tmp_path / "bucket"))
    first = fit(run(model32, storage=storage, stop_after=1))
    os.rename("checkpoints", "gone")
    for resume, said in ((None, "storage leads to file://.*of another training"), ("latest", "holds no checkpoint of")):
        with pytest.raises(ConfigError, match=said):
            fit(run(model32, algorithm=PPO_ALGORITHM, storage=storage, resume=resume))
    assert fit(run(model32, storage=storage, resume="latest")) == first
    assert names(first) == ["global_step_1", "global_step_2"]


# -- two at once --------------------------------------------------------------------------------------------------


def test_beside_a_living_run_another_is_refused_by_who_holds_the_directory(model32, tmp_path):
    with run(model32).build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        identity, directory = json.loads(json.dumps(trainer.saving.identity)), trainer.saving.directory
    assert not directory.exists(), "a run that never began leaves nothing"
    with forked(lambda: RunLock(directory, Owner.here("abcd1234", identity)).acquire()) as living:
        who = rf"run abcd1234: process {living} on \S+, since \d{{4}}-"
        for resume in (None, "latest"):
            with pytest.raises(ConfigError, match=rf"this training is saving there \({who}"):
                fit(run(model32, resume=resume))
        with pytest.raises(ConfigError, match=rf"another training \(different data\.train\) is saving there \({who}"):
            fit(run(model32, data=OTHER, save={"save_dir": str(directory)}))
        aside = run(model32, data=OTHER, experiment_name="other").build(BuildContext(run_dir=tmp_path / "aside"))
        with aside as trainer, pytest.raises(CheckpointFenced):
            trainer.saving.save_aside(directory, 0, {}, {"sampler": {}})
    assert fit(run(model32, resume="latest")) == directory  # a dead one holds nothing


@pytest.mark.parametrize("resume", ["latest", "checkpoints/verl/default"])
def test_what_a_run_saves_until_it_lets_go_of_the_directory_is_where_the_next_one_goes_on(resume, monkeypatch):
    acquire = RunLock.acquire
    for step in (1, 2):
        saved_step(SAVED, step)

    def acquire_after_the_last_save(self: RunLock) -> Any:
        for step in (3, 4):
            saved_step(SAVED, step)
        prune(CheckpointStore(SAVED), Retention(keep_last_n=2))
        return acquire(self)

    monkeypatch.setattr(RunLock, "acquire", acquire_after_the_last_save)
    chosen = choose(resume)
    assert chosen.resumed is not None
    assert chosen.resumed.step == 4
    chosen.release()


@pytest.mark.parametrize("settings", [Checkpointing(save_dir="mine"), None])
def test_the_retention_of_a_living_run_leaves_what_another_run_goes_on_from(settings):
    for step in (1, 2, 3, 4):
        saved_step(SAVED, step)
    store, rules = CheckpointStore(SAVED), Retention(keep_last_n=2)
    chosen = choose(f"{SAVED}/global_step_1", settings=settings)
    assert chosen.resumed is not None
    assert prune(store, rules) == ["global_step_2"]
    assert choose(f"{SAVED}/global_step_1", settings=settings, dry=True).in_use is None
    assert prune(store, rules) == []
    chosen.release()
    assert prune(store, rules) == ["global_step_1"]
    with pytest.raises(CheckpointNotFound, match="global_step_1 was removed"):
        CheckpointInUse(chosen.resumed.checkpoint)


def test_a_checkpoint_that_a_suspended_trainer_is_about_to_remove_is_not_waited_for_without_end(monkeypatch):
    saved_step(SAVED, 1)
    checkpoint, disk = CheckpointDirectory(SAVED).open("global_step_1"), FileSystem()
    monkeypatch.setattr(ownership, "LOCK_TIMEOUT_S", 0.0)
    lock = disk.lock(checkpoint.directory / COMMIT)
    assert lock is not None
    with pytest.raises(CheckpointNotFound, match="is a trainer that saves there suspended"):
        CheckpointInUse(checkpoint)
    disk.close(lock)
    CheckpointInUse(checkpoint).release()


def test_files_are_locked_as_nfs_wants_it(monkeypatch):
    lock_here = fcntl.flock

    def as_nfs(fd, operation):
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        if is_file and operation & fcntl.LOCK_EX and not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_RDWR:
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock_here(fd, operation)

    for step in (1, 2, 3):
        saved_step(SAVED, step)
    monkeypatch.setattr(filesystem.fcntl, "flock", as_nfs)
    store = CheckpointStore(SAVED)
    held = CheckpointInUse(store.open("global_step_1"))
    assert prune(store, Retention(keep_last_n=2)) == []
    held.release()
    assert prune(store, Retention(keep_last_n=2)) == ["global_step_1"]


@pytest.mark.slow
def test_two_runs_on_different_disks_do_not_share_a_place_in_the_store(model32, tmp_path):
    storage = LocalStorage(path=str(tmp_path / "bucket"))
    with run(model32).build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        identity = json.loads(json.dumps(trainer.saving.identity))
    place = storage.below("checkpoints/verl/default")
    with forked(lambda: StoreLease(place, Owner.here("abcd1234", identity)).acquire()) as living:
        for resume, data, what in ((None, {}, "this"), ("latest", {}, "this"), (None, {"data": OTHER}, "another")):
            with refusal("storage") as refused:
                fit(run(model32, storage=storage, resume=resume, **data))  # type: ignore
            assert f"run abcd1234: process {living} on " in str(refused.value)
            assert f"{what} training " in str(refused.value)
        assert not Path("checkpoints").exists()
    assert fit(run(model32, storage=storage, resume="latest")).name == "default"  # a dead one holds nothing


# -- sweeps -------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_sweep_started_again_goes_on_by_what_it_varies_and_not_by_the_numbers_of_its_jobs(model32, tmp_path, caplog):
    storage = LocalStorage(path=str(tmp_path / "bucket"))

    def job(number: int, lr: float, steps: int, **options: Any) -> list[str]:
        made = run(model32, lr=lr, total_steps=steps, resume="latest", storage=storage, **options)
        saved = fit(made, f"job_{number}", (f"++optimizer.lr={lr}",))
        assert saved == (SAVED / f"optimizer.lr={lr}").absolute()
        return names(saved)

    for number, lr in enumerate((1e-3, 2e-3)):
        job(number, lr, 2)
    assert job(0, 2e-3, 3) == ["global_step_2", "global_step_3"]
    shutil.rmtree("checkpoints")
    assert job(0, 2e-3, 5) == ["global_step_4", "global_step_5"]
    assert job(1, 3e-3, 1) == ["global_step_1"], "a value that the first sweep did not have"
    assert "resume=latest found no checkpoint in" in caplog.text
    assert job(2, 1e-3, 3) == ["global_step_2", "global_step_3"]
    with refusal("data.train", "resume"):
        job(0, 1e-3, 3, data=OTHER)


def test_names_of_jobs_are_valid_and_differ_where_their_overrides_do(model32):
    assert job_name("", ()) == ""
    assert job_name("job_1", ()) == "job_1"
    paths = [job_name("job_0", [f"+data.train_files=[{path}]"]) for path in ("a/b", "a?b", "x" * 300)]
    assert len(set(paths)) == 3
    assert all(len(path) < 150 and "/" not in path for path in paths)


# -- what happens to the directory meanwhile ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, *exhaustive(True)])
def test_a_directory_that_was_removed_while_training_is_made_again(is_async, model32, tmp_path, caplog):
    made = run(model32, save={"save_async": is_async}, total_steps=4)
    with made.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        course = TrainLoop(trainer, {})
        course.open()
        course.step()
        course.settle()
        shutil.rmtree(trainer.saving.directory)
        trainer.saving.directory.mkdir()  # as by a save that is in progress
        course.step()
        course.settle()
        with forked(lambda: None if RunLock.holder_of(trainer.saving.directory) else "another process may take it"):
            pass
        course.step()
        course.settle()
        course.end()
        directory = trainer.saving.directory
    assert names(directory) == ["global_step_2", "global_step_3"]
    assert "The checkpoint of step" not in caplog.text
    assert fit(run(model32, total_steps=4, resume="latest")) == directory


def test_final_weights_that_do_not_fit_are_told_in_words_and_leave_no_half(model32, tmp_path, monkeypatch):
    made = run(model32, total_steps=1, save_final=True)
    with made.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        whole = trainer.save

        def full(directory: Path) -> Any:
            whole(directory)
            raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(trainer, "save", full)
        with pytest.raises(
            NoSpaceForCheckpoint, match=r"writing the final weights to .*run failed: .*No space left.*last"
        ):
            trainer.fit()
    assert not (tmp_path / "run/actor").exists()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(("status", "resume"), each_value_once([404, 403], [None, "latest"]))
def test_a_store_that_refuses_is_told_before_weights_are_loaded(status, resume, model32, proxy, tmp_path, caplog):
    proxy.misbehave = lambda request: Fault(status=status, body=b"<Error><Code>NoSuchBucket</Code></Error>")
    storage = S3Storage(bucket="no-such-bucket", endpoint_url=proxy.url, retries=0)
    made = run(model32, storage=storage, resume=resume)
    with pytest.raises(ConfigError, match="cannot be read|which refuses: .*Fix that") as refused:
        made.build(BuildContext(run_dir=tmp_path / "run"))
    assert len(refused.value.faults) == 1
    assert "Traceback" not in caplog.text
    assert not Path("checkpoints").exists()
