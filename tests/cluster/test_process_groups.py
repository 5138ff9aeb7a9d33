"""Roles whose processes differ are refused, in every process that can know."""

import pytest
from refusals import refusal

from verl.cluster.placement import ProcessGroup, check_process_groups
from verl.errors import ConfigError

SAID = ("MATCH", "REFUSED")
PROGRAM = """
import sys
import torch.distributed as dist
from verl import check_process_groups
from verl.errors import ConfigError

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
both, same, first = dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0])
print("MATCH", check_process_groups(actor=both, critic=same))
for roles in ({"actor": both, "critic": first}, {"actor": both, "reference": None}):
    try:
        check_process_groups(roles)
    except ConfigError as error:
        print("REFUSED", error)
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_agree_on_a_match_and_refuse_a_mismatch(fork_server, tmp_path):
    (script := tmp_path / "program.py").write_text(PROGRAM)
    running = [
        fork_server.start(tmp_path, f"rank_{rank}", [rank, tmp_path / "meeting"], str(script)) for rank in range(2)
    ]
    assert [process.wait(120) for process in running] == [0, 0], [process.said() for process in running]
    lines = [[line for line in process.said().splitlines() if line.startswith(SAID)] for process in running]
    assert [found[0] for found in lines] == ["MATCH 2 processes [0, 1] over gloo"] * 2
    assert lines[0][1] == (
        "REFUSED critic has 1 process [0] over gloo, actor has 2 processes [0, 1] over gloo, so rows that one divides "
        "the other cannot join. Make both in the same group."
    )
    assert lines[1][1] == "REFUSED critic: this process, rank 1, is not in its group. Ask those that are."
    assert all("reference has 1 process [0] over none" in found[2] for found in lines)


def test_backend_and_ranks_count_too():
    assert check_process_groups(actor=None, critic=None) == ProcessGroup()
    with pytest.raises(ConfigError, match="over gloo"):
        check_process_groups(actor=ProcessGroup((0, 1), "gloo"), critic=ProcessGroup((0, 1), "nccl"))
    with pytest.raises(ConfigError, match=r"\[2, 3\]"):
        check_process_groups({"actor": ProcessGroup((0, 1), "gloo"), "critic": ProcessGroup((2, 3), "gloo")})
    with refusal("roles"):
        check_process_groups()
