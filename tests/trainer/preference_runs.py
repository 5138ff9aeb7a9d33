"""Small runs of preference optimisation and of reward models."""

from pathlib import Path

from same_training import Training
from trainer.runs import JSONL, weights

from verl.algorithms.preference_losses import BradleyTerry
from verl.component import BuildContext
from verl.data.arithmetic import ArithmeticPreferences
from verl.engines.optimizer import AdamW
from verl.engines.sharding import NoSharding
from verl.trainer.config import SFTSettings
from verl.trainer.sft import PreferenceRun, RewardModelRun
from verl.workers.actor import Actor
from verl.workers.reference import Reference

DATA = ArithmeticPreferences(digits=1, train_size=24, held_out=12)


def preference_run(model, loss, lora=None, sharding=None, checkpoint=None, resume=None, data=DATA, **settings):
    of_policy = not isinstance(loss, BradleyTerry)
    kind = PreferenceRun if of_policy else RewardModelRun
    settings = {"batch_size": 6, "total_steps": 4, "num_threads": 1, "eval_interval": 2, **settings}
    return kind(
        actor=Actor(model=model, optimizer=AdamW(lr=3e-3), lora=lora, micro_batch_tokens=40),
        sharding=sharding or NoSharding(),
        data=data,
        loss=loss,
        trainer=SFTSettings(**settings),
        tracker=JSONL,
        checkpoint=checkpoint,
        resume=resume,
        **({"reference": Reference()} if of_policy else {}),
    )


def trained(run, directory: Path) -> Training:
    metrics = {}
    with run.build(BuildContext(run_dir=directory)) as trainer:
        for step, rows in enumerate([[0, 1, 2, 3, 4], [7, 6, 5, 2], [3, 8]], start=1):
            metrics[step] = trainer.step(trainer.train_data.collate(rows), step) | trainer.evaluate(step)
        trainer.save(directory)
    return Training(metrics, weights=weights(directory))
