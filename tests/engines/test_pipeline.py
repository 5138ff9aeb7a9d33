"""Where a model is cut into stages, what a stage holds, and which models are not cut."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_paths.families import GEMMA4, plain_model, save_family
from random_models import save_random_model
from trial_rows import states_of

from verl.engines.parallel_degrees import largest_stage, stage_bounds
from verl.engines.pipeline_parallelism import StageCut, decoder_stack, refuse_untrue
from verl.engines.sharding import Parallel
from verl.errors import ConfigError
from verl.model_paths.families import family_table
from verl.models.model_stats import model_stats
from verl.models.pretrained import Pretrained


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 20))
def test_the_costliest_stage_costs_as_little_as_it_can(costs, stages, head):
    stages = min(stages, len(costs))

    def worst(bounds):
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        return max(*sums[:-1], sums[-1] + head, 0)

    bounds = stage_bounds([float(cost) for cost in costs], stages, float(head))
    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert all(a < b for a, b in itertools.pairwise(bounds))
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    assert worst(bounds) == min(worst([0, *cut, len(costs)]) for cut in cuts)


def loaded(tmp_path, family, **options):
    return Pretrained(path=str(save_random_model(tmp_path / family, family, torch.float32, **options))).load_causal_lm(
        "cpu"
    )


UNLOADED = ("emu3", "mllama")  # transformers loads no language model of their text configurations
STAGED = [
    name
    for name, records in family_table().families.items()
    if any(record.stages for record in records) and not name.startswith(UNLOADED)
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", STAGED)
def test_a_family_that_may_be_cut_gives_in_two_stages_what_it_gives_whole(family, tmp_path, monkeypatch):
    monkeypatch.setitem(GEMMA4, "num_kv_shared_layers", 0)
    model = plain_model(save_family(tmp_path, family), "eager")
    refuse_untrue(model)
    ids, stack = torch.randint(20, 100, (1, 48)), decoder_stack(model)
    whole = states_of(model, input_ids=ids)
    for num_first in range(len(stack.layers) + 1):
        line = None
        for stage in (0, 1):
            cut = StageCut(stack, [0, num_first, len(stack.layers)], stage)
            with torch.no_grad(), cut.running():
                states = cut.run(lambda: states_of(model, input_ids=ids), line)
            line = states.reshape(-1, states.shape[-1])
        assert float((line.view_as(whole) - whole).abs().max()) < 1e-4 * float(whole.abs().max())


@pytest.mark.parametrize(
    ("family", "told"),
    [("gpt2", "GPT2LMHeadModel: pipeline stages need a model with embed_tokens, layers and norm"),
     pytest.param("opt", "OPTForCausalLM: pipeline stages", marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_a_model_of_another_build_is_refused_by_name(family, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        refuse_untrue(loaded(tmp_path, family))


def test_a_model_whose_layers_share_keys_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="its last 2 layers attend to keys of earlier ones"):
        refuse_untrue(plain_model(save_family(tmp_path, "gemma4_unified_text"), "eager"))


def test_a_model_that_does_more_between_embedding_and_layers_is_refused(tmp_path):
    """Granite multiplies what the embedding gives, in the decoder's own forward: a later stage would do it again."""
    with pytest.raises(ConfigError, match="its results change when it is split into pipeline stages"):
        refuse_untrue(loaded(tmp_path, "granite", embedding_multiplier=3.0))


@pytest.mark.parametrize("tied", [False, True])
def test_the_cost_of_a_stage_is_its_layers_and_its_end(tied, tmp_path):
    path = save_random_model(tmp_path / "m", "qwen2", torch.float32, num_hidden_layers=12, tie_word_embeddings=tied)
    sizes = model_stats(Pretrained(path=str(path)).load_config())
    cost = Parallel(pp=2).cost(2, sizes, tokens=10)
    assert cost.weights == 4 * largest_stage(sizes, 2)
    assert cost.weights <= 0.55 * 4 * sizes.parameters
    assert cost.optimizer == 2 * cost.gradients == 2 * cost.weights
    assert cost.per_micro_batch == sizes.hidden * 10 * 4  # states one way, or gradients the other
    assert cost.generating == 4 * sizes.parameters
