"""Composition of YAML and command line into a checked run. Only this package imports Hydra and OmegaConf.

component_import  Imports a component by the `_target_` of its node
compose        Composes a root configuration without `hydra.main`, and applies values to it
defaults       Defaults of components, for the fields that no file of options names
explain        The whole configuration with a sentence for each field
from_yaml      Composes a run from a short YAML file over the default; single options of groups, and mappings of keys
launch         Entry point of `verl ppo` and `verl sft`: command line, run directory, logging
load_policy    Finds a trained policy, in a checkpoint or as plain weights
overrides      Overrides of a command line, a script or a short file, as options and values by path; aliases of keys
run_start      RunStart: checks of the machine, run directory, printed differences, log, before a run is built
saved_config   Allow-list of a saved configuration: what an evaluation uses without being told to
schema         The configuration directory, root keys, texts of fields
sweep          The end of a multirun: a table of its jobs
validate       Validation of a composed configuration: builds the components of a run
warm_start     Warm starts: `warm-start://NAME` is the actor that `verl sft` trains with experiment=NAME
"""
