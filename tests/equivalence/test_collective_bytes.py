"""What processes send in an update, counted where they call collectives, is what the cost model says."""

import pytest
import torch
from cases import exhaustive
from collective_bytes import planned_bytes
from equivalence.one_update import rows_with_holes
from random_models import save_random_model

from verl.engines.sharding import Parallel
from verl.models.model_stats import model_stats
from verl.models.pretrained import Pretrained

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]

ROWS = rows_with_holes([24] * 8, 1, [40])
SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
DENSE = {"intermediate_size": 128, "vocab_size": 256}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 8, "vocab_size": 256}
# The others are in tests/engines/test_traffic.py
TWO = [Parallel(ep=2), *exhaustive(Parallel(pp=2))]
FOUR = [
    Parallel(ep=4),
    *exhaustive(
        Parallel(pp=4),
        Parallel(pp=2, dp_replicate=2),
        Parallel(pp=2, dp_shard=2),
        Parallel(pp=2, cp=2),
        Parallel(ep=2),  # the experts of a process are divided over two
        Parallel(ep=2, dp_replicate=2),
    ),
]


def compared(bench, size, sharding, path, tied):
    """Bytes of the process that sends most, or where tokens go to experts of all of them, and what is planned."""
    is_mixture = getattr(sharding, "ep", 1) > 1
    family, shape = ("qwen3_moe", EXPERTS) if is_mixture else ("llama", DENSE)
    path = save_random_model(path, family, torch.float32, tie_word_embeddings=tied, **SHAPE, **shape)
    source = Pretrained(path=str(path))
    found = bench.sent_in_update(source, sharding, ROWS, 128).result(timeout=120)
    shares = sharding.row_shares(size)
    predicted, sizes = int(ROWS["response_mask"].sum()) // shares, model_stats(source.load_config())
    planned = [planned_bytes(sharding, size, sizes, ran, predicted, 4, 4) for _, ran in found]
    sent = [sum(counts.values()) for counts, _ in found]
    return (sum(sent), sum(planned)) if is_mixture else (max(sent), max(planned))


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("sharding", TWO, ids=lambda x: x.degrees(2).overrides())
def test_two_processes(sharding, tied, two_processes, tmp_path):
    sent, planned = compared(two_processes, 2, sharding, tmp_path, tied)
    assert sent == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("sharding", FOUR, ids=lambda x: x.degrees(4).overrides())
def test_four_processes(sharding, tied, four_processes, tmp_path):
    sent, planned = compared(four_processes, 4, sharding, tmp_path, tied)
    if sharding.pp > 2 and tied:  # no stage has both: two neighbours, and gradients that the ends add up
        assert 0.7 * planned < sent < planned
    else:
        assert sent == pytest.approx(planned, rel=0.01)
