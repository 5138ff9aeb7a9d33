"""Whole runs, small enough for a test: a description of each part, with room for what a test wants to be different."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verl.algorithms.advantages import GAE, GRPO, AdvantageEstimator, per_response
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import KLInLoss, KLInReward
from verl.algorithms.losses import PPOClip
from verl.checkpoint.config import Checkpointing
from verl.component import BuildContext, component
from verl.data.base import DataSplits, PromptSource
from verl.data.rlhf_dataset import RLHFDataset
from verl.engines.optimizer import AdamW
from verl.engines.sharding import NoSharding
from verl.models.pretrained import ModelSource
from verl.ops.masking import masked_sum
from verl.rewards.base import Reward, RewardDescription
from verl.rollout.hf import HFRollout
from verl.tracking.base import Trackers
from verl.tracking.jsonl import JsonLines
from verl.trainer.config import PPOSettings
from verl.trainer.ppo_config import PPORun
from verl.trainer.state.compare_runs import TIMES
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.reference import Reference

PROMPTS = ("1+2=", "34+5=", "what is 6*7? ", "9-", "77+1=", "a", "0*0*0*0=", "12+")  # of many lengths

JSONL = Trackers(jsonl=JsonLines())

PPO_ALGORITHM = Algorithm(
    advantage=GAE(lam=0.9), policy_loss=PPOClip(), kl=KLInReward(coef=0.1), entropy_coef=0.01, epochs=2, mini_batches=1
)
GRPO_ALGORITHM = Algorithm(
    advantage=GRPO(), policy_loss=PPOClip(), kl=KLInLoss(coef=0.1), aggregation="seq-mean-token-mean", mini_batches=3
)


@component
class ShakenClip(PPOClip):
    """The clipped loss times luck: what is learned depends on the generator of each process, token by token."""

    def __call__(self, log_probs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, stats = super().__call__(log_probs, batch)
        return loss * (0.5 + torch.rand(loss.shape)), stats


class RunningMean:
    """An estimator that has read every batch so far: rewards less the mean of all earlier ones."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def __call__(self, batch: Any) -> Any:
        mask = batch["response_mask"]
        scores = masked_sum(batch["token_level_rewards"], mask, dim=-1)
        credit = per_response(scores - self.total / max(1, self.count), scores, mask)
        self.total, self.count = self.total + float(scores.double().sum()), self.count + len(scores)
        return credit

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.total, self.count = state["total"], state["count"]


@component
class RunningBaseline(AdvantageEstimator):
    """An estimator with state of its own."""

    def build(self, context: BuildContext) -> RunningMean:
        return RunningMean()


class _Heating:
    def __init__(self, loss: PPOClip):
        self.loss, self.tokens = loss, 0

    def __call__(self, log_probs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.tokens += int(batch["response_mask"].sum())
        loss, stats = self.loss(log_probs, batch)
        return loss / (1 + self.tokens / 50), stats

    def state_dict(self) -> dict[str, int]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: Any) -> None:
        self.tokens = state["tokens"]


@component
class HeatingLoss(PPOClip):
    """The clipped loss, the smaller the more tokens a process has seen."""

    def build(self, context: BuildContext) -> _Heating:
        return _Heating(PPOClip())


@component
class Prompts(PromptSource):
    """Texts as prompts, each with its length as a column."""

    train: tuple[str, ...] = PROMPTS
    eval: tuple[str, ...] = ("5+5=",)
    max_prompt_length: int = 24

    def build(self, context: BuildContext) -> DataSplits:
        config = {"max_prompt_length": self.max_prompt_length}

        def made(texts: tuple[str, ...]) -> RLHFDataset:
            rows = [{"prompt": text, "length": len(text)} for text in texts]
            return RLHFDataset.from_rows(rows, context.tokenizer, config)

        return DataSplits(train=made(self.train), eval=made(self.eval) if self.eval else None)


@component
class Arbitrary(RewardDescription, Reward):
    """A score in [0, 1] that depends on every character of the response, so that no two are alike."""

    def score(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        return [sum(ord(c) * (i + 1) for i, c in enumerate(text)) % 17 / 16 for text in responses]


@component
class Echo(RewardDescription, Reward):
    """The share of a response that repeats the first character of its prompt."""

    def score(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        return [text.count(prompt[0]) / max(1, len(text)) for prompt, text in zip(prompts, responses, strict=True)]


# The least work of a step, where the subject is not what is trained
BRIEF_GRPO = replace(GRPO_ALGORITHM, mini_batches=1)
BRIEF = {"prompts_per_step": 1, "rollout": HFRollout(max_new_tokens=2), "data": Prompts(eval=())}


def ppo_run(
    model: ModelSource,
    algorithm: Algorithm = PPO_ALGORITHM,
    *,
    micro_batch_tokens: int = 4096,
    lr: float = 3e-3,
    **parts: Any,
) -> PPORun:
    """A run of 8 prompts; `parts` that are not part of a run are settings of its trainer."""
    trained = {"model": model, "optimizer": AdamW(lr=lr, schedule="linear"), "micro_batch_tokens": micro_batch_tokens}
    described: dict[str, Any] = {
        "actor": Actor(**trained),
        "critic": Critic(**trained),
        "reference": Reference(micro_batch_tokens=micro_batch_tokens),
        "reward": Arbitrary(),
        "rollout": HFRollout(max_new_tokens=7),
        "sharding": NoSharding(),
        "data": Prompts(),
        "tracker": Trackers(),
        "replay": None,
    }
    described |= {name: parts.pop(name) for name in list(parts) if name in described}
    settings = {"prompts_per_step": 3, "group_size": 2, "num_threads": 1, "device": "cpu", "eval_samples": 2}
    return PPORun(**described, algorithm=algorithm, trainer=PPOSettings(**(settings | parts)))


def every_step(directory: Path, **options: Any) -> Checkpointing:
    """Each step is saved below a directory, and kept."""
    saving = {"save_dir": str(directory / "checkpoints"), "save_interval": 1, "keep_last_n": None, "save_async": False}
    return Checkpointing(**saving | options)


def fit(run: Any, run_dir: Path) -> Any:
    """Train to the end; returns the result."""
    with run.build(BuildContext(run_dir=run_dir)) as trainer:
        return trainer.fit()


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, each line of which must be valid."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def step_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl about steps of PPO."""
    return [line for line in read_lines(run_dir / "metrics.jsonl") if "actor/loss" in line]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what the clock says."""
    return {k: v for k, v in record.items() if not k.startswith(TIMES)}


def weights(directory: Path) -> dict[str, Any]:
    """Every tensor of every safetensors file below a directory, by file and name."""
    from safetensors.torch import load_file

    files = sorted(directory.rglob("*.safetensors"))
    return {f"{file.relative_to(directory)}:{name}": x for file in files for name, x in load_file(file).items()}
