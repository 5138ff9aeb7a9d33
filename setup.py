"""Installs the package, its configuration files as `verl.conf`, and the command `verl`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "verl/__init__.py").read_text()).group(1)
conf = [str(path.parent.relative_to(here)) for path in here.glob("conf/**/*.yaml")]


def pinned(name: str) -> list[str]:
    lines = (here / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


setup(
    name="verl",
    version=version,
    license="Apache-2.0",
    license_files=["LICENSE"],
    description="Reinforcement-learning post-training of language models, from a laptop to a cluster",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["verl", "verl.*"]),
        *sorted({c.replace("conf", "verl.conf", 1).replace("/", ".") for c in conf}),
    ],
    package_dir={"verl": "verl", "verl.conf": "conf"},
    package_data={
        "verl": ["py.typed"],
        **{c.replace("conf", "verl.conf", 1).replace("/", "."): ["*.yaml"] for c in set(conf)},
    },
    install_requires=pinned("requirements.txt"),
    extras_require={
        "ray": pinned("requirements-ray.txt"),
        "storage": pinned("requirements-storage.txt"),
        "test": [
            *pinned("requirements-dev.txt"),
            *pinned("requirements-ray.txt"),
            *pinned("requirements-storage.txt"),
        ],
        "bench": pinned("requirements-bench.txt"),
    },
    entry_points={
        "console_scripts": ["verl = verl.cli.main:app", "verl-checkpoint-compat = verl.cli.checkpoint_report:app"]
    },
)
