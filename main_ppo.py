"""Train a language model by reinforcement learning: `verl ppo` of a checkout; `--help` lists groups and options."""

from verl.cli.train import training_command
from verl.utils.child_process.interpreter import run_main

main = training_command("ppo")

if __name__ == "__main__":
    run_main(main)
