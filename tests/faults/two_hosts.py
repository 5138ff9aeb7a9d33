"""Two hosts on one machine: each has a network, a disk, a process table and a name of its own (root only).

    host A 10.213.77.1 ── bridge ── veth pair ── 10.213.77.2 host B       DISK: the same path on both, another disk

What is not below DISK, /dev/shm or HOME is the same on both, as on machines that were installed alike.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DISK = Path("/mnt")
NETWORK = "10.213.77"
PORT = 6399
WAIT_S = 120.0
INIT = """
mount --make-rprivate /
mount -t tmpfs -o size=2g tmpfs {disk} && mount -t tmpfs -o size=2g tmpfs /dev/shm
mkdir -p {disk}/home {disk}/tmp {disk}/work
hostname {name}
echo ready
while :; do sleep 1; done
"""


def why_not() -> str | None:
    """Why this machine cannot play two hosts; None where it can."""
    if os.geteuid() != 0:
        return "network and mount namespaces need root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is not installed"
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", str(DISK)]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.strip()}"


class Host:
    """One of the two, from its start until the power goes.

    Args:
        number: 1 or 2.
    """

    def __init__(self, number: int):
        self.address, self.name = f"{NETWORK}.{number}", f"host{'ab'[number - 1]}"
        script = INIT.format(disk=DISK, network=NETWORK, name=self.name)
        words = [
            "unshare",
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--mount-proc",
            "bash",
            "-c",
            script,
        ]
        self._outer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        self.init = int(children[0])

    @property
    def disk(self) -> Path:
        """Its working directory, as this process sees it."""
        return Path(f"/proc/{self.init}/root{DISK}/work")

    def command(self, *words: str) -> list[str]:
        given = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        given |= {"HOME": f"{DISK}/home", "TMPDIR": f"{DISK}/tmp", "VERL_CACHE": f"{DISK}/home/cache"}
        given |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        entered = ["nsenter", "--target", str(self.init), "--all", "env", "-i", f"--chdir={DISK}/work"]
        return [*entered, *(f"{name}={value}" for name, value in given.items()), *words]

    def run(self, *words: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
        """A command to its end; output and errors together."""
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.run(self.command(*words), **both, timeout=timeout_s, check=False)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ray(self, *words: str) -> None:
        script = "from ray.scripts.scripts import main; main()"
        more = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats"]
        more += [f"--node-ip-address={self.address}"]
        done = self.run(sys.executable, "-c", script, "start", *words, *more)
        assert done.returncode == 0, done.stdout

    def power_off(self) -> None:
        """All its processes, and its disk, are gone."""
        if self._outer.poll() is None:
            os.kill(self.init, signal.SIGKILL)
            self._outer.wait()


class TwoHosts:
    """Both, joined by a cable and as one Ray cluster."""

    def __init__(self) -> None:
        self.hosts = [Host(1), Host(2)]
        self._join()

    @property
    def driver(self) -> Host:
        return self.hosts[0]

    @property
    def address(self) -> str:
        return f"{NETWORK}.1:{PORT}"

    def replace(self, *numbers: int) -> None:
        """Take the power from hosts; others of the same address and name, whose disks are empty, join."""
        for number in numbers:
            self.hosts[number - 1].power_off()
            self.hosts[number - 1] = Host(number)
        self._join(1 in numbers)

    def cut(self, kind: str) -> None:
        """Part the hosts: `cable` takes the link down; `to a`, `to b` and `both` lose all packets in that direction,
        which are sent to a machine that does not exist.
        """
        first, second = self.hosts
        if kind == "cable":
            ip(first, "link", "set", "cable", "down")
        nowhere = ["lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev"]
        if kind in ("to a", "both"):
            ip(second, "neigh", "replace", first.address, *nowhere, "cable")
        if kind in ("to b", "both"):
            ip(first, "neigh", "replace", second.address, *nowhere, "lan")

    def close(self) -> None:
        for host in self.hosts:
            host.power_off()

    def _join(self, with_head: bool = True) -> None:
        first, second = self.hosts
        for words in ("link set lo up", "link add lan type bridge", f"addr add {first.address}/24 dev lan"):
            ip(first, *words.split(), check=with_head)  # its address stays when the other host goes, as behind a switch
        ip(first, *["link", "set", "lan", "up"])
        ip(first, *["link", "del", "cable"], check=False)
        ip(first, *f"link add cable type veth peer name cable netns {second.init}".split())
        ip(first, *["link", "set", "cable", "master", "lan", "up"])
        for words in ("link set lo up", f"addr add {second.address}/24 dev cable", "link set cable up"):
            ip(second, *words.split())
        if with_head:
            first.ray("--head", f"--port={PORT}", f"--temp-dir={DISK}/ray", "--include-dashboard=false")
        second.ray(f"--address={self.address}")


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    both = TwoHosts()
    try:
        yield both
    finally:
        both.close()


def ip(host: Host, *words: str, check: bool = True) -> None:
    subprocess.run(["nsenter", "--target", str(host.init), "--net", "ip", *words], check=check, capture_output=True)
