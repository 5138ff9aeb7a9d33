"""Main memory that a process keeps and returns."""

import subprocess
import sys

import pytest

from verl.utils import main_memory

SCRIPT = """
import re, time, torch
from verl.utils import main_memory as memory
free = [100]
memory.free_main_memory, memory.POLL_INTERVAL_S = lambda: free[0], 0.01
memory.keep_freed_memory()
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
tensors = [torch.ones(2**19) for _ in range(128)]  # 2 MiB each
whole = resident()
del tensors[::2]
kept = resident()
free[0] = 10
while resident() > whole - 60:
    time.sleep(0.01)
more = [torch.ones(2**20) for _ in range(32)]  # larger than the holes
grown = resident()
del more
print(whole - kept, grown - resident())
"""


@pytest.mark.slow
def test_freed_memory_is_kept_until_memory_is_scarce():
    """With holes between tensors that live; a test that hangs has kept it."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=300)
    kept, returned = map(float, ran.stdout.split())
    assert kept < 8
    assert returned > 120
    assert "freed memory is returned" in ran.stderr


def test_a_container_that_has_read_files_to_its_limit_has_memory(tmp_path, monkeypatch):
    for name, text in {
        "max": "1000\n",
        "current": "990\n",
        "stat": "anon 90\nactive_file 300\ninactive_file 600\n",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(main_memory, "CGROUP", tmp_path)
    assert main_memory.free_main_memory() == 910
