"""Train a language model on written answers: `verl sft` of a checkout; `--help` lists groups and options."""

from verl.cli.train import train_sft as main

if __name__ == "__main__":
    main()
