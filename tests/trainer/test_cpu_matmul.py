"""`trainer.cpu_matmul`: runs by MKL and by oneDNN agree to rounding, in one process and in two."""

import pytest
import torch
from trainer.runs import ppo_run

from verl.component import BuildContext
from verl.engines.sharding import DDP
from verl.models.tiny import TinyModel

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
WIDE = TinyModel(hidden_size=256, intermediate_size=1024)  # wide enough for oneDNN to compute its products


def steps_of(library, directory, number=2, **parts):
    run = ppo_run(WIDE, cpu_matmul=library, prompts_per_step=6, group_size=4, lr=1e-4, **parts)
    with run.build(BuildContext(run_dir=directory)) as trainer:
        messages = trainer.saving.messages
        metrics = [
            trainer.step(trainer.train_data.collate(trainer.sampler.next_batch()), step)
            for step in range(1, number + 1)
        ]
    return messages, [{k: v for k, v in step.items() if not k.startswith(("timing/", "perf/"))} for step in metrics]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({}, id="one process", marks=pytest.mark.exhaustive),
        pytest.param({"sharding": DDP(), "n_gpus_per_node": 2}, id="two", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_by_onednn_equals_one_by_mkl_to_rounding_and_says_so(parts, tmp_path):
    plain, expected = steps_of("mkl", tmp_path / "mkl", **parts)
    said, found = steps_of("onednn", tmp_path / "onednn", **parts)
    line = "Large float32 products on the CPU are computed by oneDNN (trainer.cpu_matmul=mkl: by MKL)."
    assert (line in said, line in plain) == (True, False)
    assert found != expected  # it did compute them
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
