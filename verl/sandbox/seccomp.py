"""The seccomp filter of a jail, in classic BPF, for Linux on x86-64: system calls that are refused.

All other system calls are allowed: a program may open and map files, fork, and use pipes and sockets of its own network
namespace. The refused calls give access to other processes, mounts, namespaces, kernel interfaces that ordinary
programs do not need, or memory that no resource limit counts.
"""

from __future__ import annotations

import errno
import struct

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


def program() -> bytes:
    """The filter, as an array of struct sock_filter."""
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
