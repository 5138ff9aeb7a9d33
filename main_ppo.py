"""Train a language model by reinforcement learning; `python main_ppo.py --help` tells what can be chosen."""

from verl.component import BuildContext
from verl.compose.check import check
from verl.compose.entry import Job, entry_point
from verl.compose.show import show
from verl.compose.warm_start import resolve_warm_starts


@entry_point("ppo")
def main(job: Job) -> None:
    run = check(job.config, job.faults)  # every fault at once, before any weight is loaded
    show(job.config, job.console)
    job.record()
    run = resolve_warm_starts(run, job.console)  # the embedded starting weights are made on first use
    trainer = run.build(BuildContext(run_dir=job.run_dir, job=job.name))
    try:
        trainer.fit()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
