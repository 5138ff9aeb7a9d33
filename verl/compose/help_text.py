"""The text of `--help` of the commands that train: usage, examples, and the options of every group."""

from __future__ import annotations

import textwrap
from typing import Any

from verl.compose.schema import ROOTS, group_options, root_keys

_GROUPS = {
    "actor": "The model that is trained, with its optimizer and LoRA.",
    "algorithm": "Advantages, loss, KL penalty, number of updates.",
    "checkpoint": "When the whole training state is saved, and how.",
    "critic": "The model that estimates values, for algorithms that need it.",
    "data": "Prompts or texts to train on, and held-out ones.",
    "debug": "Small variations that work with every experiment.",
    "environment": "Episodes of several turns, with tools or a world.",
    "experiment": "A whole run as one file.",
    "loss": "The loss of preferences.",
    "reference": "The frozen model of the KL penalty, or a teacher.",
    "replay": "Whether scored rows are kept and used again.",
    "reward": "How a response is scored.",
    "rollout": "The engine that samples responses.",
    "sandbox": "Where programs run that the model wrote.",
    "sharding": "How the model and its work are divided over processes.",
    "storage": "A second place for checkpoints, in object storage.",
    "sweep": "Several runs from one command, compared in a table.",
    "tracker": "Where metrics, samples and tables go.",
    "trainer": "Length of the run, batch sizes, evaluation, devices.",
}


def help_text(root: str) -> str:
    """The help of a root, with the options of the user's directories. Hydra would take seconds to list them.

    Args:
        root: a name of `ROOTS`.
    """
    options, indent = group_options(), " " * 6
    wrap: Any = {"width": 80, "initial_indent": indent, "subsequent_indent": indent, "break_on_hyphens": False}
    groups = "\n".join(
        f"  {group}: {_GROUPS.get(group, '')}\n{textwrap.fill(', '.join(options[group]), **wrap)}"
        for group in sorted(root_keys(root))
    )
    return f"""{ROOTS[root].purpose}

  usage: verl {ROOTS[root].command} [GROUP=OPTION ...] [PATH.TO.KEY=VALUE ...] [-m]

  examples{ROOTS[root].examples}

  groups
{groups}

  Every key is explained in conf/<group>/<option>.yaml.
  Results go to outputs/<project>/<experiment>/<time>.
"""
