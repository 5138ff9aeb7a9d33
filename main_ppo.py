"""Train a language model by reinforcement learning: `verl ppo` of a checkout; `--help` lists groups and options."""

from verl.cli.train import train_ppo as main
from verl.utils.child_process.interpreter import run_main

if __name__ == "__main__":
    run_main(main)
