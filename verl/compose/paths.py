"""Finds the configuration directory, in a checkout as well as in an installed package."""

from __future__ import annotations

from pathlib import Path

import verl


def conf_dir() -> Path:
    """The directory of ppo.yaml and its groups: `conf/` beside the package in a checkout, `verl/conf/` in a wheel.

    Raises:
        FileNotFoundError: neither is there, so the installation is broken.
    """
    package = Path(verl.__file__).resolve().parent
    candidates = (package.parent / "conf", package / "conf")
    for directory in candidates:
        if (directory / "ppo.yaml").is_file():
            return directory
    looked = " and ".join(str(directory) for directory in candidates)
    raise FileNotFoundError(f"no ppo.yaml in {looked}: install verl again, its configuration is missing.")


def group_options(directory: Path) -> dict[str, list[str]]:
    """Every config group of a configuration directory with its options, Hydra's own groups left out."""
    groups = sorted(item for item in directory.iterdir() if item.is_dir() and item.name != "hydra")
    return {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}
