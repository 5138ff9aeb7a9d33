"""From YAML and command line to a checked run. Only this package imports Hydra and OmegaConf.

aliases       Other people's spellings of our keys, and what this version does not have
check         Turns a composed configuration into the description of a run, or reports every fault in it at once
composition   Composes a root configuration outside of `hydra.main`, and lays values over it
entry         What the main scripts share: the command line, the clean end of a run
keywords      Mappings that are passed to the library's faces in place of configuration
nearest       Finds the known name that a mistyped one was probably meant to be
option        One option of a group as the description that it is, without the rest of a run
overrides     Turns what a user assigns, on the command line or in a short file
paths         Finds the configuration directory, in a checkout as well as in an installed package
plain         Reads a composed configuration into plain Python; a value that cannot be resolved becomes a fault
save          Writes the configuration of a run beside its results, without secrets
saved_policy  Finds a trained policy, in a checkpoint or as plain weights
schema        The root keys of a run, as dataclasses that make Hydra reject any other
short_file    Composes a run from a short file of a user's, laid over the default configuration
show          Shows a composed configuration once, as a tree, without secrets
start         From a composed configuration and objects of the user to a trainer that runs
sweep         The end of a multirun: its jobs side by side
torchrun      The main scripts under torchrun: the first of the processes that it started drives
warm_start    Makes what `warm-start://NAME` stands for: the actor that main_sft.py trains with experiment=NAME
"""
