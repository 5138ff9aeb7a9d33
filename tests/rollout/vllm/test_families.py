"""Models of several families in vLLM, an adapter merged on its way there, and what vLLM cannot run, in our words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import verl

# test_client.py and the proofs of weights start such engines in `make test`
pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.exhaustive]
ROOT = Path(verl.__file__).parents[1]


def outcomes(directory: Path, *cases: str) -> dict[str, dict]:
    """What one process with the engines of all these cases tells."""
    script = Path(__file__).with_name("vllm_engines_in_one_process.py")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, script, directory, *cases], env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cases = ("no room", "little room", "room", "strange", "versions", "reloaded", "keep", "recompute", "lora")
    return outcomes(tmp_path_factory.mktemp("engines"), *cases)


def draws_the_same(outcome: dict, *, is_anew: bool = False) -> None:
    assert "error" not in outcome, outcome
    assert min(outcome["same"]) >= 0.96  # of 32 rows; rounding may turn one
    assert max(outcome["gap"]) < 5e-4
    assert (outcome["anew"] is not None) == is_anew  # vLLM loads its model itself where it makes more of a tensor


def test_families_draw_the_same_before_and_after_every_weight_has_changed(tmp_path):
    for name, outcome in outcomes(tmp_path, "qwen2_tied", "qwen3_moe", "llama", "qwen3_tied").items():
        draws_the_same(outcome, is_anew=name == "qwen3_moe")


def test_an_adapter_is_merged_on_the_way(found):
    draws_the_same(found["lora"])


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_size_that_fits(found):
    for case in ("no room", "little room"):
        error = found[case]["error"]
        assert error.startswith("ConfigError: rollout.kv_cache_gib is 0.000")
        assert "one sequence of 256 tokens alone take 0.0004 GiB. Set it to at least that, or rollout.max_mod" in error
    assert found["room"]["error"] is None


def test_no_block_of_former_weights_or_with_mixed_keys_is_shared_with_a_later_request(found):
    outcome = found["versions"]
    cached = [[cached for cached, _ in requests] for requests in outcome["found"]]
    # the first weights had read a part of the long prompt, which was open: the second have read it anew
    assert cached == [[0, 128, 128], [0, 0, 128], [0, 0, 128]]
    assert max(gap for requests in outcome["found"] for _, gap in requests) < 1e-4


def test_a_model_that_vllm_loads_itself_is_loaded_in_the_middle_of_a_response(found):
    assert "mlp.experts" in found["reloaded"]["anew"]
    assert found["reloaded"]["unproven"] == []
    assert found["reloaded"]["proven"] == 45
    assert found["reloaded"]["gap"] < 1e-4


def test_rows_whose_keys_are_kept_are_not_preempted(found):
    assert found["keep"] == {"preemptions": 0}
    assert found["recompute"]["preemptions"] > 0


def test_an_architecture_that_vllm_lacks_is_refused_with_the_engine_that_has_it(found):
    assert found["strange"]["error"] == (
        "ConfigError: actor.model is a StrangeForCausalLM: vLLM does not have this architecture. Set rollout=hf."
    )
