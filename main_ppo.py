"""Train a language model by reinforcement learning: `verl ppo` of a checkout; `--help` lists groups and options."""

from verl.cli.train import train_ppo as main

if __name__ == "__main__":
    main()
