"""Trainings that are cut and resumed: what each is made of, and what two of them must agree in.

Agree means bit by bit: every tensor and every plain value of each checkpoint, every metric but times, and every prompt
and response that was rated, in their order.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.trainer.state.compare_runs import Tolerance, first_part_apart, steps_of

# Draws from all three global generators, so that a state that was not restored shows in the next reward; and writes
# down what it rates, a file for each process.
REWARD = """
import json, os, random
import numpy, torch

def rate(prompts, responses):
    with open(f"texts/{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps([prompts, responses]) + "\\n")
    luck = random.random() + numpy.random.rand() + float(torch.rand(()))
    return [len(set(response)) + luck * (index + 1) for index, response in enumerate(responses)]

def often_equal(prompts, responses):
    scores = rate(prompts, responses)
    return [float(len(set(response)) > 4) for response in responses] if scores else scores
"""
QUIET = ["tracker.tensorboard=null"]
SIZES = ["actor.micro_batch_tokens=24", "actor.optimizer.lr=1e-3", "trainer.num_threads=1"]
SUMS = ["data.digits=1", "data.held_out=2", "data.train_size=12"]  # three steps an epoch
PPO = ["critic.optimizer.lr=1e-3", "algorithm.epochs=2", "algorithm.entropy_coef=0.01", "trainer.group_size=1"]
GRPO = ["algorithm=grpo", "algorithm.mini_batches=2", "trainer.group_size=2"]


@dataclass(frozen=True)
class Course:
    """A kind of training.

    Attributes:
        overrides: of the main script.
        reward: which function of `REWARD`; None for supervised fine-tuning.
        mode: of saving.
    """

    overrides: tuple[str, ...]
    reward: str | None = "rate"
    mode: str = "async"

    @property
    def script(self) -> str:
        return "main_ppo.py" if self.reward else "main_sft.py"

    def arguments(self, model: Path, directory: Path, num_steps: int) -> list[str]:
        """All overrides but the run's directory; writes the files that they name into `directory`."""
        (directory / "texts").mkdir(exist_ok=True)
        (directory / "rewards.py").write_text(REWARD)
        chosen = ["actor=pretrained", f"actor.model.path={model}"]
        if self.reward:
            rating = ["reward=function", f"reward.path={directory}/rewards.py:{self.reward}", "trainer.eval_samples=2"]
            chosen += [*rating, "trainer.prompts_per_step=4", "rollout.max_new_tokens=6"]
        saving = [f"checkpoint={self.mode}", "checkpoint.save_interval=1", "checkpoint.keep_last_n=null"]
        saving += [f"checkpoint.save_dir={directory}/checkpoints", "trainer.save_final=false", "resume=latest"]
        length = [f"trainer.total_steps={num_steps}", "trainer.eval_interval=2"]
        own = [text.replace("HERE", str(directory)) for text in self.overrides]
        return [*own, *chosen, *QUIET, *SIZES, *saving, *length]


COURSES = {
    "ppo": Course((*PPO, *SUMS)),
    "grpo": Course((*GRPO, *SUMS), mode="sync"),
    "ppo, adaptive KL": Course(
        ("algorithm=ppo_adaptive_kl", "algorithm.kl.target=0.1", "algorithm.kl.horizon=40", *SUMS)
    ),
    "grpo, lora": Course((*GRPO, *SUMS, "+actor.lora.rank=2")),
    "grpo, files": Course(
        (*GRPO, "data=files", "data.train_files=[HERE/a.jsonl,HERE/b.jsonl]", "data.eval_files=[HERE/a.jsonl]",
         "data.weights=[2,1]", "data.on_bad_row=skip", "data.max_prompt_length=16"),
    ),
    "dapo": Course(("algorithm=dapo", "trainer.group_size=2", *SUMS), reward="often_equal"),
    "sft": Course(
        ("data=sft_files", "data.train_files=[HERE/a.jsonl,HERE/b.jsonl]", "data.eval_files=[HERE/a.jsonl]",
         "data.weights=[1,3]", "data.on_bad_row=skip", "data.max_length=24", "trainer.batch_size=4"),
        reward=None,
    ),
}  # fmt: skip


def write_files(directory: Path) -> None:
    """Two files of eight and five rows, with one that cannot be used in each."""
    for name, count in (("a", 8), ("b", 5)):
        rows: list[dict[str, object]] = [{"prompt": f"{name}{i}+{i}=", "completion": str(2 * i)} for i in range(count)]
        rows.insert(2, {"prompt": "", "completion": "no question"} if name == "a" else {"prompt": 7, "completion": "7"})
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_difference(whole: Path, cut: Path) -> str | None:
    """The first thing in which the runs of one directory differ from the uninterrupted one of another directory."""
    return _checkpoint_apart(whole, cut) or _metric_apart(whole, cut) or _text_apart(whole, cut)


def steps_saved(directory: Path) -> list[int]:
    """The steps of all complete checkpoints, in order of publication."""
    return [checkpoint.step for checkpoint in CheckpointDirectory(directory / "checkpoints").complete()]


def _checkpoint_apart(whole: Path, cut: Path) -> str | None:
    twins = {checkpoint.step: checkpoint for checkpoint in CheckpointDirectory(whole / "checkpoints").complete()}
    for checkpoint in CheckpointDirectory(cut / "checkpoints").complete():
        found = first_part_apart(twins[checkpoint.step], checkpoint, Tolerance())
        if found is not None:
            return f"{checkpoint.name}: {found}"
    return None


def _metric_apart(whole: Path, cut: Path) -> str | None:
    """Every number that a run wrote before it was killed must be the twin's."""
    twin = steps_of(whole / "run")
    for file in sorted(cut.glob("*/metrics.jsonl")):
        for step, numbers in steps_of(file.parent).items():
            for key, value in numbers.items():
                expected = twin.get(step, {}).get(key)
                if expected is None or not Tolerance().numbers(expected, value):
                    return f"{file.parent.name}, step {step}: {key} is {value} and was {expected}"
    return None


def _text_apart(whole: Path, cut: Path) -> str | None:
    """What a run rated must be a stretch of what the twin did."""
    (twin,) = [file.read_text().splitlines() for file in (whole / "texts").glob("*.jsonl")] or [[]]
    for file in (cut / "texts").glob("*.jsonl"):
        lines = file.read_text().splitlines()
        begin = twin.index(lines[0]) if lines and lines[0] in twin else 0
        if twin[begin : begin + len(lines)] != lines:
            return f"the responses of process {file.stem} are not those of the uninterrupted run"
    return None
