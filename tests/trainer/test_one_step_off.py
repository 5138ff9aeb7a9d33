"""Drawing one step ahead is refused where it cannot be right."""

from __future__ import annotations

import pytest

from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.errors import ConfigError

CORRECTION = "algorithm.correction={_target_:verl.algorithms.importance_sampling.TruncatedIS}"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([CORRECTION], "HFRollout generates with the tensors that are being trained"),
        ([], "requires importance weights"),
        ([CORRECTION, "algorithm=dapo"], "selection draws further batches"),
        ([CORRECTION, "algorithm=remax"], "greedy baseline"),
        ([CORRECTION, "trainer.repeat_first_batch=true"], "every batch is the first"),
        ([CORRECTION, "trainer.rollout_ahead=2"], "must lie in \\[0, 1\\]"),
    ],
)
def test_it_is_refused_with_the_reason(overrides, says):
    with pytest.raises(ConfigError, match=says):
        validate(compose_root("ppo", ["trainer.rollout_ahead=1", *overrides]))
