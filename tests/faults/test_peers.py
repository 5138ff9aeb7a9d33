"""The same faults, below every library, against verl and against other ways to save.

Of the others nothing is asserted but that every case was tried and came out as something: see docs/checkpoints.md for
what did.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from faults.calls import build, environment, why_not
from faults.peers.outcomes import OUTCOMES
from faults.peers.tools import DistributedCheckpoint, Ours, TorchSave, TorchSaveLatest
from faults.peers.training import Gate, Training

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

GROUPS = {"kill", "error", "short write"}
POWER = {f"power cut {model}, {moment}" for model in ("posix", "journal") for moment in ("during it", "after the save")}


def campaign(directory, *arguments):
    """The rows that a campaign prints."""
    command = [sys.executable, "-m", "faults.peers.campaign", *arguments]
    env = environment(build(directory))
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_whole(row):
    """Every case goes on from the newest step that was saved, with every bit of it."""
    assert {outcome for counts in row["counts"].values() for outcome in counts} == {"whole"}, row["examples"]
    assert sum(row["silent"].values()) == row["claimed"] == 0


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


def test_some_faults_leave_ours_whole_and_every_peer_classified(tmp_path, record_property):
    tools = ["verl-2", "trainer-2", "torch", "dcp"]
    rows = campaign(tmp_path, "--tools", ",".join(tools), "--sample", "5", "--cuts", "16")
    for row in rows:
        check_cases(row, dict.fromkeys(GROUPS, 5), 16)
    check_whole(rows[0])
    record_property("fault_cases", len(rows) * (3 * 5 + 2 * 16))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tool", ["verl", "verl-2", "trainer-2", "torch-2", "torch-synced", "dcp-2"])
def test_every_fault_leaves_ours_whole_and_every_peer_classified(tool, tmp_path, record_property):
    (row,) = campaign(tmp_path, "--tools", tool, "--cuts", "400")
    calls, writes = row["calls"], row["writes"]
    strikes = {"kill": 2 * calls + writes, "error": 4 * calls, "short write": writes}
    check_cases(row, strikes, 400)
    if tool in ("verl", "verl-2", "torch-synced"):  # the last shows that the faults are not unfair
        check_whole(row)
    record_property("fault_cases", sum(strikes.values()) + 2 * 400)
