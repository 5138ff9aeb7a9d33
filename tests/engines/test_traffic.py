"""What a process sends in an update is what the cost model says, for every way of dividing a model.

Of a group this process alone is there: what others send is made up, and how much of it is asked for is not. Stages of a
pipeline and experts, which exchange numbers of tokens first, are run in tests/equivalence/test_collective_bytes.py.
"""

import pytest
import torch
import torch.distributed as dist
from cases import each_value_once, exhaustive
from collective_bytes import bytes_of_update, planned_bytes
from equivalence.one_update import rows_with_holes
from random_models import save_random_model
from torch.testing._internal.distributed.fake_pg import FakeStore

from verl.component import BuildContext
from verl.engines.sharding import DDP, FSDP, HSDP, TP, TPFSDP, Parallel
from verl.models.heads import LMHead
from verl.models.model_stats import model_stats
from verl.models.pretrained import Pretrained

SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
CASES = [
    (DDP(), 2, None),
    (FSDP(), 4, "bfloat16"),
    (FSDP(strategy="SHARD_GRAD_OP"), 4, None),
    (HSDP(replicas=2), 4, None),
    (FSDP(reduce_gradients="update"), 4, "bfloat16"),
    (HSDP(replicas=2, reduce_gradients="update"), 4, None),
    (TP(), 2, None),
    (TPFSDP(tensor_parallel=2), 4, None),
    (Parallel(cp=2), 2, None),
    (Parallel(cp=2, cp_style="ulysses"), 4, None),
    (Parallel(cp=4), 8, None),
]


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(LMHead, "is_whole_state", lambda self: True)  # compares numbers of all processes
    yield lambda size: dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    dist.destroy_process_group()


def sent_by(sharding, size, autocast, tied, group, tmp_path):
    """What an update of several micro-batches sends, and what the cost model says."""
    path = save_random_model(tmp_path, "llama", torch.float32, tie_word_embeddings=tied, vocab_size=256, **SHAPE)
    source, rows = Pretrained(path=str(path)), rows_with_holes([24] * 8, 1, [40])
    group(size)
    parallel = sharding.build(BuildContext(rank=0, world_size=size))
    parallel.sums = dict  # objects of others are not there
    sent, ran = bytes_of_update(source.load_causal_lm("cpu"), parallel, rows, 128, autocast)
    sizes, predicted = model_stats(source.load_config()), int(rows["response_mask"].sum())
    return sent, planned_bytes(sharding, size, sizes, ran, predicted, 4, 2 if autocast else 4), len(ran)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tied"),
    each_value_once({f"{number} {case[0]}": case for number, case in enumerate(CASES)}, {"": False, "tied": True}),
)
def test_an_update_sends_what_the_cost_model_says(case, tied, group, tmp_path):
    sharding, size, autocast = case
    sent, wanted, _ = sent_by(sharding, size, autocast, tied, group, tmp_path)
    assert sent.total() == pytest.approx(wanted, rel=0.01), sent
    assert wanted > 500_000


@pytest.mark.parametrize("strategy", ["FULL_SHARD", *exhaustive("SHARD_GRAD_OP")])
def test_gradients_are_reduced_once_per_update_or_once_per_micro_batch(strategy, group, tmp_path):
    sharding = FSDP(strategy=strategy, reduce_gradients="update")
    sent, _, micro_batches = sent_by(sharding, 4, None, False, group, tmp_path)
    assert micro_batches > 2
    dist.destroy_process_group()
    each, _, _ = sent_by(FSDP(strategy=strategy), 4, None, False, group, tmp_path)
    assert each["_reduce_scatter_base"] == micro_batches * sent["_reduce_scatter_base"] > 0
    assert each["_allgather_base"] == sent["_allgather_base"]
