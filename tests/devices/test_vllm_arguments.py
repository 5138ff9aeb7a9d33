"""What a vLLM engine is asked for on a GPU: sizes by arithmetic, and vLLM's own checks of them with a GPU's numbers."""

import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from cases import has_tests
from devices.shapes import GIB, H100, beside, llama_8b, save_llama_8b
from refusals import refusal
from transformers import AutoModelForCausalLM

from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.rollout.engine_process.process import EngineError
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.vllm.engine_args import EngineArgs, as_config_error, write_model_directory
from verl.rollout.vllm.gpu_memory import cache_bytes, engine_shape, utilization
from verl.utils.memory import DeviceMemory

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM's own checks need vLLM")

ROLLOUT = VLLMRollout(max_new_tokens=1024, max_model_len=2048)
BUSY = beside(25.0)  # a trainer of 8B over 8 GPUs: 15 GiB at rest, gathered weights


def arguments(options: VLLMRollout, memory: DeviceMemory, needed: int | None, directory: str) -> dict:
    """As `engine_args` makes them on a GPU of which only the numbers are here."""
    shape = engine_shape(options, llama_8b(), torch.bfloat16)
    cache = cache_bytes(options, shape, memory, needed)
    rank = 16 if options.lora == "adapter" else None
    setting = EngineArgs(
        options, directory, torch.bfloat16, 1, True, rank, "", cache, utilization(shape, cache, memory)
    )
    return setting.engine_arguments()


CASES = {
    "default": (ROLLOUT, BUSY, 25 * GIB),
    "beside a trainer that nothing is known of": (ROLLOUT, BUSY, None),
    "a cache of 8 GiB": (replace(ROLLOUT, kv_cache_gib=8.0), BUSY, 25 * GIB),
    "written by hand": (replace(ROLLOUT, enforce_eager=True, sleep=False), BUSY, 40 * GIB),
    "over two GPUs": (replace(ROLLOUT, tensor_parallel_size=2), BUSY, 25 * GIB),
    "two stages": (replace(ROLLOUT, pipeline_parallel_size=2), BUSY, 25 * GIB),
    "two stages of four GPUs": (replace(ROLLOUT, tensor_parallel_size=4, pipeline_parallel_size=2), BUSY, 25 * GIB),
    "an adapter": (replace(ROLLOUT, lora="adapter"), BUSY, 25 * GIB),
    "a long context": (replace(ROLLOUT, max_model_len=32768), BUSY, 25 * GIB),
    "a GPU of its own": (ROLLOUT, H100, 0),
    "captured graphs": (replace(ROLLOUT, enforce_eager=False), BUSY, 25 * GIB),
    "no prefix cache": (replace(ROLLOUT, prefix_caching=False, max_num_batched_tokens=8192), BUSY, 25 * GIB),
    "an adapter that is merged, over eight GPUs": (replace(ROLLOUT, tensor_parallel_size=8), BUSY, 25 * GIB),
    "few rows": (replace(ROLLOUT, max_num_seqs=4), BUSY, 25 * GIB),
}
ROOT = Path(__file__).parents[2]
SETTING = re.compile(r"rollout\.(\w+)=([a-z0-9._]+)")


def shipped() -> dict[str, VLLMRollout]:
    """The options of conf/rollout that become a vLLM engine, and settings of it that documents and scripts name."""
    found = {}
    for option in ("vllm", "auto"):
        rollout = validate(compose_root("ppo", [f"rollout={option}"])).rollout
        found[f"rollout={option}"] = rollout if option == "vllm" else rollout.as_kind(VLLMRollout)
    own = {field.name for field in fields(VLLMRollout)} - {field.name for field in fields(HFRollout)}
    files = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("scripts/*.py"), *ROOT.glob("conf/**/*.yaml")]
    for name, value in {pair for file in files for pair in SETTING.findall(file.read_text())}:
        value = value.rstrip(".")
        if name in own and value not in ("t", "n", "p", "null"):
            given = [f"rollout.{name}={value}"]
            found[given[0]] = validate(compose_root("ppo", ["rollout=vllm", *given])).rollout
    return {name: replace(rollout, max_model_len=rollout.max_model_len or 2048) for name, rollout in found.items()}


def told_by_vllm(cases: dict[str, tuple[dict, DeviceMemory]], directory: str, folder: Path) -> dict:
    """What vLLM says to each of some cases, in a process of its own."""
    (folder / "cases").write_bytes(pickle.dumps((directory, cases)))
    script = Path(__file__).with_name("vllm_checks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "cases"), str(folder / "told")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "told").read_text())


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    """What vLLM says to a cache that is too large; where exhaustive tests run, to each of the cases too, and to its own
    default where a trainer has a third of the GPU.
    """
    folder = tmp_path_factory.mktemp("vllm")
    directory = str(save_llama_8b(folder / "model"))
    cases = {"too large": (arguments(replace(ROLLOUT, kv_cache_gib=60.0), BUSY, 25 * GIB, directory), BUSY)}
    if has_tests(request, "exhaustive"):
        cases |= {name: (arguments(*case, directory), case[1]) for name, case in CASES.items()}
        asked = dict(cases["default"][0])
        del asked["gpu_memory_utilization"]
        cases["vLLM's own default"] = (asked, BUSY)
    return told_by_vllm(cases, directory, folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_vllm_starts_beside_a_trainer_with_what_it_is_asked_for(told, name):
    options, memory, _ = CASES[name]
    found = told[name]
    assert "error" not in found
    assert found["requested"] <= memory.free
    assert found["cache"] > engine_shape(options, llama_8b(), torch.bfloat16).cache_of(1)
    assert found["eager"] is (options.enforce_eager is True)  # CUDA graphs unless the user says otherwise
    assert found["sleeps"] is found["gives back graphs"] is found["gives back communicators"] is bool(options.sleep)
    assert found["workers"] == options.num_workers


@pytest.mark.exhaustive
def test_vllm_takes_every_engine_setting_that_is_shipped_or_documented(tmp_path):
    directory, settings = str(save_llama_8b(tmp_path / "model")), shipped()
    assert {"rollout=vllm", "rollout=auto", "rollout.tensor_parallel_size=8"} <= settings.keys()
    cases = {name: (arguments(one, BUSY, 25 * GIB, directory), BUSY) for name, one in settings.items()}
    found = told_by_vllm(cases, directory, tmp_path)
    assert {name: said["error"] for name, said in found.items() if "error" in said} == {}
    assert all(said["requested"] <= BUSY.free for said in found.values())


@pytest.mark.slow  # our own refusal of too little memory, below, is in `make test`
def test_a_cache_that_does_not_fit_is_named_with_what_is_free(told):
    refusal = EngineError(told["too large"]["error"])
    setting = EngineArgs(replace(ROLLOUT, kv_cache_gib=60.0), "", torch.bfloat16, 1, True, utilization=0.99)
    said = str(as_config_error(refusal, setting, None))
    assert "rollout.kv_cache_gib is 60.0: with the engine's weights that takes 0.99 of the GPU and" in said
    assert "53.5" in said  # GiB are free
    assert said.endswith("null for what is left beside the trainer.")


def test_a_cache_of_null_takes_what_is_left_and_no_more_than_rows_can_fill():
    shape = engine_shape(ROLLOUT, llama_8b(), torch.bfloat16)
    assert 14.5 * GIB < shape.weights < 15.5 * GIB
    assert shape.row == 2 * 32 * 8 * 128 * 2
    beside_small, beside_large = (cache_bytes(ROLLOUT, shape, BUSY, x * GIB) for x in (25, 50))
    assert beside_small > 25 * GIB
    assert beside_small - beside_large == pytest.approx(0.9 * 25 * GIB, rel=0.01)
    assert beside_small + shape.weights + shape.overhead + 25 * GIB < H100.free
    few = replace(ROLLOUT, max_num_seqs=4)
    assert cache_bytes(few, engine_shape(few, llama_8b(), torch.bfloat16), H100, 0) == pytest.approx(
        4 * 2048 * shape.row, rel=0.05
    )
    assert cache_bytes(ROLLOUT, shape, None, None) == GIB  # on a CPU


def test_memory_that_does_not_hold_one_row_is_refused_with_all_numbers():
    with refusal("rollout.kv_cache_gib"):
        cache_bytes(ROLLOUT, engine_shape(ROLLOUT, llama_8b(), torch.bfloat16), BUSY, 62 * GIB)


@pytest.mark.exhaustive
def test_engines_of_one_model_have_one_directory_so_that_what_vllm_compiles_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(llama_8b()) for _ in range(2)]
        narrower = llama_8b()
        narrower.intermediate_size //= 2
        models.append(AutoModelForCausalLM.from_config(narrower))
    places = []
    for number, model in enumerate(models):
        (tmp_path / str(number)).mkdir()  # of one engine, with a random name
        places.append(write_model_directory(model, tmp_path / str(number)))
    assert places[0] == places[1] != places[2]
    assert json.loads((places[0] / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert sorted(path.name for path in (tmp_path / "cache" / "engine_models").iterdir()) == sorted(
        {place.name for place in places}
    )
    cases = {name: (arguments(ROLLOUT, memory, 25 * GIB, ""), memory) for name, memory in KEYED.items()}
    found = [told_by_vllm(cases, str(place), tmp_path) for place in (places[0], places[1], places[2])]
    keys = [{said["key"] for said in one.values()} for one in found]
    assert keys[0] == keys[1]
    assert len(keys[0]) == 1  # nor do amounts of free memory change it
    assert keys[0] != keys[2]


KEYED = {"25 GiB beside": BUSY, "30 GiB beside": beside(30.0)}


def test_a_model_directory_is_in_the_files_of_the_engine_where_no_cache_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "file" / "cache"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_8b())
    assert write_model_directory(model, tmp_path) == tmp_path / "model"
