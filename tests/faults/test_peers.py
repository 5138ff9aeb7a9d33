"""The same faults, below every library, against verl and against other ways to save.

Of the others nothing is asserted but that every case was tried and came out as something: see docs/results.md for
what did.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from faults.calls import environment
from peers.outcomes import OUTCOMES
from peers.tools import DistributedCheckpoint, Ours, TorchSave, TorchSaveLatest
from peers.training import Gate, Training

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {"kill", "error", "short write"}
POWER = {f"power cut {model}, {moment}" for model in ("posix", "journal") for moment in ("during it", "after the save")}


def campaign(library, *arguments):
    """The rows that a campaign prints."""
    command = [sys.executable, "-m", "peers.campaign", *arguments]
    done = subprocess.run(command, env=environment(library), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_whole(row):
    """Every case goes on from the newest step that was saved, with every bit of it."""
    assert {outcome for counts in row["counts"].values() for outcome in counts} == {"whole"}, row
    assert sum(row["silent"].values()) == 0


def check_cases(row, strikes, cuts):
    assert set(row["counts"]) == GROUPS | POWER
    assert {outcome for counts in row["counts"].values() for outcome in counts} <= set(OUTCOMES)
    assert {group: sum(row["counts"][group].values()) for group in GROUPS} == strikes
    assert all(sum(row["counts"][group].values()) == cuts // 2 for group in POWER)


@pytest.mark.parametrize(
    "tool", [Ours(), TorchSave(), TorchSaveLatest("renamed"), DistributedCheckpoint()], ids=lambda tool: tool.name
)
def test_without_a_fault_every_tool_goes_on_with_every_bit(tool, tmp_path):
    tool.train(tmp_path, Gate(lambda: None, lambda step: None))
    live = Training()
    live.run(lambda: None, Gate(lambda: None, lambda step: None))
    assert tool.resume(tmp_path) == live.resumed()


@pytest.mark.exhaustive
@pytest.mark.parametrize("tool", ["verl", "verl-2", "trainer-2", "torch-2", "torch-synced", "dcp-2"])
def test_every_fault_leaves_ours_whole_and_every_peer_classified(tool, library, record_property):
    (row,) = campaign(library, "--tools", tool, "--cuts", "400")
    calls, writes = row["calls"], row["writes"]
    strikes = {"kill": 2 * calls + writes, "error": 4 * calls, "short write": writes}
    check_cases(row, strikes, 400)
    if tool in ("verl", "verl-2", "torch-synced"):  # the last shows that the faults are not unfair
        check_whole(row)
    record_property("fault_cases", sum(strikes.values()) + 2 * 400)
