"""A checkpoint that every process wrote a part of is the one that a single process writes, and loads anywhere."""

from pathlib import Path

import pytest
from same_training import course as saved_course
from same_training import newest
from trainer.runs import PPO_ALGORITHM

from verl.checkpoint.core.checkpoint import open_checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.reader import CheckpointReader, open_verified
from verl.component import BuildContext, as_plain
from verl.engines.sharding import DDP, FSDP, HSDP, TPFSDP
from verl.trainer.api.load_checkpoint import load_checkpoint
from verl.trainer.train_loop import TrainLoop

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]

OWN = ("rng",)  # each process has generators of its own


def digest(checkpoint: Path) -> str:
    return CheckpointReader(open_verified(FileSystem(), checkpoint, "full")).digest(OWN)


def started(run, directory: Path):
    return run.build(BuildContext(run_dir=directory))


def under_way(trainer) -> TrainLoop:
    course = TrainLoop(trainer, as_plain(trainer.description))
    course.open()
    return course


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("fsdp", 2),
        pytest.param("ddp", 3, marks=pytest.mark.exhaustive),
        pytest.param("hsdp", 4, marks=pytest.mark.exhaustive),
        pytest.param("tp_fsdp", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_what_runs_loads_what_it_saved_and_repeats_the_step_bit_by_bit(name, processes, model64, tmp_path):
    sharding = {"fsdp": FSDP(), "ddp": DDP(), "hsdp": HSDP(), "tp_fsdp": TPFSDP()}[name]
    shared = {"sharding": sharding, "n_gpus_per_node": processes}
    run = saved_course(model64, tmp_path, PPO_ALGORITHM, save={"save_async": True, "max_shard_gib": 2e-5}, **shared)
    with started(run, tmp_path / "run") as trainer:
        course = under_way(trainer)
        course.step()
        course.step()
        course.settle()
        first, second = (tmp_path / f"checkpoints/global_step_{step}" for step in (1, 2))
        before = digest(first), digest(second)
        load_checkpoint(course, first)
        aside = course.save(directory=tmp_path / "aside")
        assert digest(aside) == before[0]
        course.step()
        course.settle()
        repeated = newest(tmp_path)
        assert (repeated.name, digest(repeated.directory)) == ("global_step_2", before[1])  # the same: saved once
        course.end()
    manifest = open_checkpoint(FileSystem(), second).manifest
    files = {entry.path for entry in manifest.files}
    place = [f"_tp_rank_{rank % 2}_pp_rank_0" if name == "tp_fsdp" else "" for rank in range(processes)]
    assert {f"optimizer/optim_state_rank_{rank}{place[rank]}.safetensors" for rank in range(processes)} <= files
    assert len([path for path in files if path.startswith("actor/model-")]) > processes
    assert_opens(second, tmp_path, model64)


def assert_opens(checkpoint: Path, directory: Path, model) -> None:
    """One process goes on from it, and saves the same; transformers opens it by itself."""
    from transformers import AutoModelForCausalLM

    _, told = AutoModelForCausalLM.from_pretrained(checkpoint / "actor", output_loading_info=True)  # type: ignore
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    alone = saved_course(model, directory / "alone", PPO_ALGORITHM, resume=str(checkpoint))
    with started(alone, directory / "alone/run") as trainer:
        assert digest(under_way(trainer).save(directory=directory / "alone/aside")) == digest(checkpoint)
