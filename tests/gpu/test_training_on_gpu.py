"""Tier 1, torch on one GPU: numbers of the CPU, resume, sampling, memory against the plan."""

import pytest
import torch
from gpu.needs import gpus
from roles import experience, start_actor
from same_training import course, numbers, same_training, saved
from torch.nn.attention import SDPBackend, sdpa_kernel
from trainer.runs import fit

from verl.engines.sharding import FSDP
from verl.models.tiny import TinyModel
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.weight_sync.stream import reads_peers
from verl.trainer.plan.workload import device_here
from verl.utils.memory import computes_bfloat16
from verl.utils.seeding import seed_everything

pytestmark = gpus()

MODEL = TinyModel(hidden_size=64, intermediate_size=128)
CUBLAS_BYTES = 64 << 20  # workspaces that torch allocates for cuBLAS and cuBLASLt, of one stream each
EXACT = TinyModel(dtype="float64", hidden_size=64, intermediate_size=128)


def test_the_backend_that_attention_takes_is_told(record_property):
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(4, 8, 128, 64, device="cuda", dtype=dtype)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
            try:
                with sdpa_kernel(backend):
                    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            except RuntimeError:
                continue
            found.append(f"{dtype}: {backend.name}")
            break
    record_property("sdpa", found)
    assert any("bfloat16: FLASH" in name for name in found)


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_scores_and_an_update_are_those_of_the_cpu(packing, prompts):
    cpu, gpu = (start_actor(EXACT, device=device, packing=packing) for device in ("cpu", "cuda:0"))
    rows = experience(cpu, prompts(), num_samples=6)
    scores = [actor.compute_log_probs(rows)["old_log_probs"] for actor in (cpu, gpu)]
    # transformers computes the sines of positions in float32 on any model: one bit of them differs between the devices
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-6)
    left, right = (actor.update(rows) for actor in (cpu, gpu))
    for name, value in left.items():
        assert right[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_tokens_are_those_that_the_cpu_draws(prompts):
    rows = [start_actor(EXACT, device=d).generate(prompts(), GenerationRequest(0, 8)) for d in ("cpu", "cuda:0")]
    same = (rows[0]["responses"] == rows[1]["responses"]).all(dim=1).double().mean()
    assert same >= 0.99


def test_a_resumed_run_goes_on_exactly(tmp_path, model32):
    asynchronous = {"save_async": True}  # through pinned memory
    fit(course(model32, tmp_path / "whole", device="cuda", save=asynchronous), tmp_path / "whole")
    half = str(tmp_path / "whole" / "checkpoints" / "global_step_2")
    fit(course(model32, tmp_path / "rest", resume=half, device="cuda", save=asynchronous), tmp_path / "rest")
    same_training(saved(tmp_path / "rest", "."), saved(tmp_path / "whole", "."), after=2)


def test_an_update_takes_the_memory_that_the_plan_says(tmp_path, prompts):
    from verl.engines.sharding import NoSharding
    from verl.models.model_stats import model_stats
    from verl.trainer.plan.activations import trace_activations

    model = TinyModel(hidden_size=512, intermediate_size=2048, num_layers=8)
    actor = start_actor(model, device="cuda:0", packing="off", micro_batch_tokens=4096)
    rows = experience(actor, prompts(), num_samples=64)
    actor.update(rows)
    torch.cuda.synchronize()
    resting = torch.cuda.memory_allocated()
    stats = model_stats(actor.model.config)
    assert resting - CUBLAS_BYTES == pytest.approx(12 * stats.parameters, rel=0.1)  # float32 weights and two moments
    torch.cuda.reset_peak_memory_stats()
    actor.update(rows)
    cost = NoSharding().cost(1, stats, 4096, 4, 4)
    tokens = min(4096, int(rows["attention_mask"].sum()))
    traced = trace_activations(actor.model.config, tokens, torch.float32, device_type="cuda")
    planned = resting + cost.gradients + traced.training + traced.logits
    assert torch.cuda.max_memory_allocated() <= 1.15 * planned


def test_nothing_of_a_micro_batch_waits_for_the_device(prompts):
    actor = start_actor(MODEL, device="cuda:0", micro_batch_tokens=64)
    rows = experience(actor, prompts(), num_samples=6)
    actor.update(rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = list(actor.engine.micro_batches(rows))
        for micro in made:
            actor.micro_batch_scores(actor.model, micro)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(made) > 1


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_two_updates_over_rows_of_2000_tokens_are_equal_bit_by_bit(packing, prompts):
    found = []
    for _ in range(2):
        seed_everything(7)
        model = TinyModel(hidden_size=256, intermediate_size=512)
        rollout = HFRollout(max_new_tokens=2000, min_new_tokens=2000)
        actor = start_actor(model, rollout, device="cuda:0", autocast="bfloat16", packing=packing)
        actor.update(experience(actor, prompts(), num_samples=2))
        found.append([p.detach().clone() for p in actor.model.parameters()])
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_moments_of_an_offloaded_model_of_two_processes_go_on_in_main_memory(tmp_path, model32):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices; this machine has {torch.cuda.device_count()}")
    shape = {"device": "cuda", "n_gpus_per_node": 2, "sharding": FSDP(cpu_offload=True, timeout_s=120.0)}
    fit(course(model32, tmp_path / "whole", **shape), tmp_path / "whole")
    half = str(tmp_path / "whole" / "checkpoints" / "global_step_2")
    fit(course(model32, tmp_path / "rest", resume=half, **shape), tmp_path / "rest")
    assert numbers(tmp_path / "rest") == {step: numbers(tmp_path / "whole")[step] for step in (3, 4)}


def test_groups_and_devices_say_what_the_settings_say():
    assert computes_bfloat16("cuda:0") is torch.cuda.is_bf16_supported(including_emulation=False)
    here, name = device_here("cuda"), torch.cuda.get_device_name(0)
    assert here.name.startswith(name)
    assert here.memory >= torch.cuda.get_device_properties(0).total_memory
    assert reads_peers(torch.device("cuda:0")) in (True, False)
