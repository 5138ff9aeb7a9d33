"""Processes of other versions than the driver's are refused by name, whichever of them it is."""

from __future__ import annotations

import pytest

from verl.cluster.worker import refuse_mixed_versions, versions
from verl.errors import ConfigError


@pytest.mark.parametrize("name", ["python", "torch", "verl"])
def test_the_one_machine_that_has_another_version_is_named(name):
    here = versions()
    refuse_mixed_versions([here, here, here], "trainer.placement.address")
    others = [here, {**here, name: "0.1"}, here]
    with pytest.raises(ConfigError, match=rf"placement\.address: rank 1 has {name} 0\.1, the driver has \d"):
        refuse_mixed_versions(others, "trainer.placement.address")
