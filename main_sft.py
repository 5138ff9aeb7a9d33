"""Train a language model on written answers: `verl sft` of a checkout; `--help` lists groups and options."""

from verl.cli.train import training_command
from verl.utils.child_process.interpreter import run_main

main = training_command("sft")

if __name__ == "__main__":
    run_main(main)
