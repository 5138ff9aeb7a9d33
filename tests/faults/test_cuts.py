"""A trainer that ends in the middle of a step, of an evaluation, of a save, makes that step again, bit by bit."""

import dataclasses
import functools
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.courses import COURSES, first_difference, steps_saved, write_files
from faults.fork_server import Cut, ForkServer

from verl.trainer.state.compare_runs import steps_of

STEPS = 6  # three of an epoch; evaluated after 2, 4 and 6
GENERATION = "verl.rollout.token_sampler:TokenSampler.pick"  # of the next token
REWARD = "verl.rewards.function:CallableReward.score"
CRITIC, ACTOR = "verl.workers.critic:CriticWorker.update", "verl.workers.actor:ActorWorker.update"
MICRO_BATCH = "verl.workers.actor:ActorWorker.micro_batch_loss"
EVALUATION = "verl.trainer.sampling:Sampling.evaluate"  # greedily first, then with samples
DATA = "verl.data.sampler:DataSampler.next_batch"
SAVE = "verl.trainer.state.checkpointing:CheckpointSaver.save"
COPY, DRAIN = (
    "verl.checkpoint.save.async_writer:CheckpointWriter.copy",
    "verl.checkpoint.save.async_writer:CheckpointWriter.drain",
)
WRITE, PUBLISH = (
    "verl.checkpoint.commit.rank_writer:RankWriter.keep_file",
    "verl.checkpoint.commit.store:SaveTransaction.publish",
)

OF_THE_END = {
    "in the last update": Cut(ACTOR, STEPS),
    "in the last evaluation": Cut(EVALUATION, STEPS, after=True),
    "when all is saved": Cut(DRAIN, STEPS, after=True),
}
OF_A_STEP = {
    "in generation, before anything was saved": Cut(GENERATION, 1, call=3),
    "in generation": Cut(GENERATION, 2, call=3),
    "in the reward": Cut(REWARD, 2),
    "between micro-batches": Cut(MICRO_BATCH, 2, call=2),
    "between mini-batches": Cut(ACTOR, 3, after=True),
    "at the boundary of an epoch": Cut(DATA, 3, after=True),
}
CUTS = {
    "ppo": OF_A_STEP
    | {"between the epochs of the critic": Cut(CRITIC, 4, call=2), "in evaluation": Cut(EVALUATION, 4, after=True)}
    | {"before the save": Cut(SAVE, 4), "before the copy": Cut(COPY, 5), "after the copy": Cut(COPY, 5, after=True)}
    | OF_THE_END,
    "grpo": OF_A_STEP
    | {"in evaluation": Cut(EVALUATION, 4, after=True), "before the save": Cut(SAVE, 4)}
    | {"in the writing": Cut(WRITE, 5, call=2), "before the publication": Cut(PUBLISH, 5)}
    | {"after the publication": Cut(PUBLISH, 5, after=True)}
    | OF_THE_END,
    "ppo, adaptive KL": {
        "in the reward": Cut(REWARD, 2),
        "between mini-batches": Cut(ACTOR, 3, after=True),
        "after the copy": Cut(COPY, 4, after=True),
    },
    "grpo, lora": {
        "in generation": Cut(GENERATION, 2, call=3),
        "between mini-batches": Cut(ACTOR, 3, after=True),
        "before the copy": Cut(COPY, 4),
    },
    "grpo, files": {
        "in the reward": Cut(REWARD, 2),
        "at the boundary of an epoch": Cut(DATA, 3, after=True),
        "in evaluation": Cut(EVALUATION, 4, after=True),
    },
    "dapo": {
        "when further prompts were drawn": Cut(DATA, 0, after=True),
        "in the generation for further prompts": Cut(GENERATION, 0, call=8),
        "between mini-batches": Cut(ACTOR, 0, after=True),
    },
    "sft": {
        "between micro-batches": Cut("verl.workers.sft:SFTWorker.micro_batch_loss", 2, call=2),
        "at the boundary of an epoch": Cut(DATA, 3, after=True),
        "in evaluation": Cut("verl.workers.sft:SFTWorker.evaluate", 4),
        "before the copy": Cut(COPY, 5),
        "when all is saved": Cut(DRAIN, STEPS, after=True),
    },
}
SHORT = {"between mini-batches": Cut(ACTOR, 2, after=True)}  # of PPO, in three steps


@pytest.fixture(scope="module")
def twin(server, dir32, tmp_path_factory) -> Callable[[str, int], Path]:
    """The directory of the uninterrupted run of a course."""

    @functools.cache
    def made(course: str, steps: int) -> Path:
        directory = carried_out(server, course, dir32, tmp_path_factory.mktemp("twins") / "whole", {}, steps)
        assert steps_saved(directory) == list(range(1, steps + 1))
        return directory

    return made


def carried_out(
    server: ForkServer, course: str, model: Path, directory: Path, cuts: dict[str, Cut], steps: int = STEPS
) -> Path:
    """Run a course in a new directory, cut and resumed at each of some places, to its end."""
    directory.mkdir()
    write_files(directory)
    arguments = COURSES[course].arguments(model, directory, steps)
    for number, (where, cut) in enumerate(cuts.items()):
        child = server.start(directory, f"run_{number}", arguments, COURSES[course].script, cut)
        assert child.wait() == -signal.SIGKILL, f"not cut {where}:\n{child.said()}"
    last = server.start(directory, "run", arguments, COURSES[course].script)
    assert last.wait() == 0, last.said()
    return directory


def further_step(whole: Path) -> int:
    """A step for which the dynamic sampling of DAPO has drawn further prompts, before the last one."""
    rounds = {step: numbers.get("selection/rounds", 0.0) for step, numbers in steps_of(whole / "run").items()}
    found = [step for step in range(2, STEPS) if rounds[step] > 1]
    assert found, f"no further prompts were drawn: {rounds}"
    return found[0]


CASES = [pytest.param(course, cuts, STEPS, id=course, marks=pytest.mark.exhaustive) for course, cuts in CUTS.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("course", "cuts", "steps"), [pytest.param("ppo", SHORT, 3, id="ppo, one"), *CASES])
def test_a_run_cut_anywhere_goes_on_as_if_it_had_not_been(
    course, cuts, steps, server, twin, dir32, tmp_path, record_property
):
    whole = twin(course, steps)
    if course == "dapo":
        cuts = {where: dataclasses.replace(cut, step=further_step(whole)) for where, cut in cuts.items()}
    cut = carried_out(server, course, dir32, tmp_path / "cut", cuts, steps)
    assert first_difference(whole, cut) is None
    assert set(steps_saved(cut)) == set(range(1, steps + 1))
    record_property("fault_cases", len(cuts))
