"""Train a language model on written answers; `python main_sft.py --help` tells what can be chosen."""

from verl.compose.launch import LaunchedRun, entry_point
from verl.compose.validate import refuse_here, validate
from verl.compose.warm_start import resolve_warm_starts


@entry_point("sft")
def main(job: LaunchedRun) -> None:
    run = validate(job.config, job.faults)  # every fault at once, before any weight is loaded
    refuse_here(run, job.context)  # what this machine lacks for it, and what does not answer
    job.record()  # says what differs from the defaults, saves the configuration, and logs to run.log
    run = resolve_warm_starts(run, job.console)  # the embedded starting weights are made on first use
    trainer = run.build(job.context)
    try:
        trainer.fit()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
