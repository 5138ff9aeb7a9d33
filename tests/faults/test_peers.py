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


def check_ours(row):
    """Every case goes on from the newest step that was saved, with every bit of it."""
    assert {outcome for counts in row["counts"].values() for outcome in counts} == {"whole"}, row["examples"]
    assert sum(row["silent"].values()) == row["claimed"] == 0


def check_cases(row, strikes, cuts):
    assert set(row["counts"]) == GROUPS | POWER
    assert {outcome for counts in row["counts"].values() for outcome in counts} <= set(OUTCOMES)
    assert {group: sum(row["counts"][group].values()) for group in GROUPS} == strikes
    assert all(sum(row["counts"][group].values()) == cuts // 2 for group in POWER)


def test_some_faults_leave_ours_whole_and_every_peer_classified(tmp_path, record_property):
    rows = campaign(tmp_path, "--sample", "8", "--cuts", "16")
    for row in rows:
        check_cases(row, dict.fromkeys(GROUPS, 8), 16)
        if row["name"].startswith("verl"):
            check_ours(row)
    record_property("fault_cases", len(rows) * (3 * 8 + 2 * 16))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tool", ["verl", "trainer", "torch", "dcp"])
def test_every_fault_leaves_ours_whole_and_every_peer_classified(tool, tmp_path, record_property):
    (row,) = campaign(tmp_path, "--tools", f"{tool}-2", "--cuts", "1000")
    calls, writes = row["calls"], row["writes"]
    strikes = {"kill": 2 * calls + writes, "error": 4 * calls, "short write": writes}
    check_cases(row, strikes, 1000)
    if tool == "verl":
        check_ours(row)
    record_property("fault_cases", sum(strikes.values()) + 2 * 1000)
