"""A checkpoint that is not on the machine of a worker is refused with what to do."""

import socket

import pytest

from verl.errors import CheckpointNotFound
from verl.workers.load_state import RestoreSource


def test_a_checkpoint_that_this_machine_does_not_have_is_refused_with_its_name_and_the_machines(tmp_path):
    gone = tmp_path / "checkpoints/global_step_3"
    with pytest.raises(CheckpointNotFound) as caught:
        RestoreSource(gone).reader()
    assert str(gone) in str(caught.value)
    assert f"is not on the machine {socket.gethostname()}" in str(caught.value)
