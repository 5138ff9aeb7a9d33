"""The budget of a run agrees with what a run takes, and warns where that is more than there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from random_models import save_random_model
from trainer.saved_runs import course, fit

from verl.compose.compose import compose_root
from verl.compose.schema import conf_dir
from verl.compose.validate import validate
from verl.engines.sharding import DDP, FSDP, Sharding, ShardingCost
from verl.models.model_stats import model_stats
from verl.trainer.plan import memory_estimate as budget_module
from verl.trainer.plan.memory_estimate import (
    GIB,
    MemoryEstimate,
    RoleMemory,
    estimate_ppo,
    estimate_sft,
    free_disk,
    free_memory,
    remedies,
)

ROOT = conf_dir().parent
MEASURE = """
import json, sys
import torch
from roles import experience, start_actor
from verl.models.pretrained import Pretrained
from verl.rollout.hf import HFRollout
from verl.utils.memory import forget_peak, peak_memory
import os
from verl.ops.counter_rng import TRAINING
from verl.protocol import DataProto

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.set_num_threads(1)
width, rows = 96, 8
prompts = DataProto.from_dict({
    "prompts": torch.randint(4, 60, (rows, 80)), "prompt_mask": torch.ones(rows, 80, dtype=torch.bool),
    "prompt_ids": torch.arange(rows), "group_ids": torch.arange(rows)})
small = start_actor(Pretrained(path=sys.argv[2]), HFRollout(max_new_tokens=width - 80, min_new_tokens=width - 80))
batch = experience(small, prompts, 1)
small.update(batch)  # whatever is loaded on first use
del small
before = resident()
actor = start_actor(Pretrained(path=sys.argv[1]))
loaded = resident() - before
actor.update(batch)  # the optimizer has its state from here on
after = resident() - before
forget_peak()
actor.update(batch)
peak = peak_memory()[os.getpid()] - before
print(json.dumps({"loaded": loaded, "after": after, "peak": peak}))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the kernel does not tell peaks of memory")
def test_it_agrees_with_what_an_update_takes(tmp_path):
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 256}
    large = save_random_model(tmp_path / "large", "qwen2", torch.float32, **shape)
    small = save_random_model(tmp_path / "small", "qwen2", torch.float32, max_position_embeddings=256)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory goes back, so that what is held is what is counted
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(large), str(small)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    roles = ["actor=pretrained", f"actor.model.path={large}", "critic=none", "algorithm=grpo", "reference=none"]
    sizes = ["trainer.prompts_per_step=4", "trainer.group_size=2", "data.max_prompt_length=80"]
    run = validate(compose_root("ppo", [*roles, *sizes, "rollout.max_new_tokens=16", "algorithm.kl.coef=0"]))
    actor = estimate_ppo(run).roles[0]
    assert measured["loaded"] == pytest.approx(actor.weights, rel=0.15)
    assert measured["peak"] == pytest.approx(actor.resident + actor.gradients + actor.working, rel=0.3)


def test_parameters_are_counted_as_the_model_has_them(tmp_path):
    from transformers import AutoModelForCausalLM

    for family, options in (
        ("llama", {"num_key_value_heads": 2}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("opt", {}),
    ):
        model = AutoModelForCausalLM.from_pretrained(
            save_random_model(tmp_path / family, family, torch.float32, **options)
        )
        sizes = model_stats(model.config)
        assert sizes.parameters == sizes.trained == sum(p.numel() for p in model.parameters())


def test_a_family_without_a_language_model_head_is_counted_too():
    from transformers import AutoModel, DistilBertConfig

    config = DistilBertConfig(vocab_size=96, dim=32, hidden_dim=64, n_layers=2, n_heads=4)
    assert model_stats(config).parameters == sum(p.numel() for p in AutoModel.from_config(config).parameters())


def test_an_estimate_that_fails_stops_no_run(model32, tmp_path, monkeypatch, caplog):
    def failing(run):
        raise KeyError("num_attention_heads")

    monkeypatch.setattr(budget_module, "estimate_ppo", failing)
    assert fit(course(model32, tmp_path, total_steps=1), tmp_path / "run").status == "finished"
    assert "cannot be estimated: KeyError" in caplog.text


def test_an_adapter_and_a_divided_model_take_less():
    def actor(*overrides: str) -> RoleMemory:
        return estimate_ppo(
            validate(compose_root("ppo", ["actor=tiny_scratch", "critic=tiny_scratch", *overrides]))
        ).roles[0]

    whole, adapted = actor(), actor("actor.lora={_target_:verl.models.lora.LoRA,rank:4}")
    assert adapted.optimizer < whole.optimizer / 5
    assert adapted.weights >= whole.weights
    recomputed = actor("actor.gradient_checkpointing=true")
    assert recomputed.working < whole.working
    shared = actor("sharding=ddp", "+sharding@actor.sharding=fsdp", "trainer.n_gpus_per_node=4")
    assert shared.resident == whole.resident // 4
    assert 0 < shared.gathered < shared.generating == whole.weights


def test_processes_that_share_layers_work_on_the_same_rows():
    def budget(*choices):
        return estimate_ppo(
            validate(compose_root("ppo", ["actor=tiny_scratch", "trainer.prompts_per_step=4", *choices]))
        )

    one, rows, layers = budget(), *(budget(f"sharding={name}", "trainer.n_gpus_per_node=4") for name in ("ddp", "tp"))
    assert layers.roles[0].working == one.roles[0].working == 4 * rows.roles[0].working
    assert layers.cache == rows.cache == one.cache // 4  # of the own heads, for all rows


def test_processes_of_a_mesh_share_the_memory_of_the_machine():
    tiny = "actor=tiny_scratch"
    mesh = ("trainer=mesh", "sharding=fsdp", "trainer.placement.devices=[cpu:0,cpu:1]")
    assert estimate_ppo(validate(compose_root("ppo", [tiny, *mesh]))).processes == 2
    ray = (
        "trainer=ray",
        "sharding=fsdp",
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=2",
        "trainer.placement.address=auto",
    )
    assert estimate_ppo(validate(compose_root("ppo", [tiny, *ray]))).processes == 4  # on this machine


def test_a_run_of_supervised_fine_tuning_has_a_budget_too():
    one, two = (
        estimate_sft(validate(compose_root("sft", list(choices))))
        for choices in ((), ("sharding=fsdp", "trainer.n_gpus_per_node=2"))
    )
    assert list(one.phases()) == ["update actor"]
    assert two.roles[0].resident == one.roles[0].resident // 2
    assert (one.processes, two.processes, one.saving) == (1, 2, two.saving)
    assert one.flops > 0


def test_what_an_asynchronous_save_copies_counts_where_the_copy_lies():
    def budget(option: str) -> MemoryEstimate:
        return estimate_ppo(validate(compose_root("ppo", ["actor=tiny_scratch", "critic=tiny_scratch", option])))

    beside, still = budget("checkpoint=async"), budget("checkpoint=sync")
    assert beside.copied == beside.saving > still.copied == 0
    assert beside.peak[1] - still.peak[1] == beside.saving
    on_gpu = replace(beside, on_host=False)
    assert on_gpu.peak[1] == still.peak[1]
    (warning,) = on_gpu.warnings(None, None, beside.saving - 1)
    assert warning.startswith("Main memory may not suffice: what is saved and offloaded needs about")
    assert list(on_gpu.warnings(None, None, beside.saving)) == []
    offloaded = replace(on_gpu, roles=(replace(on_gpu.roles[0], is_offloaded=True), *on_gpu.roles[1:]))
    assert offloaded.host - on_gpu.host == on_gpu.roles[0].resident + on_gpu.roles[0].gradients
    assert on_gpu.peak[1] > offloaded.peak[1]


def test_an_engine_beside_the_trainer_takes_its_cache_and_its_weights():
    overrides = ["actor=tiny_scratch", "critic=tiny_scratch", "rollout=vllm", "rollout.kv_cache_gib=2"]
    budget = estimate_ppo(validate(compose_root("ppo", overrides)))
    assert budget.cache == 2 * GIB + budget.roles[0].weights


def test_what_may_not_suffice_is_told_with_the_numbers():
    role = RoleMemory("actor", weights=4 * GIB, gradients=4 * GIB, optimizer=8 * GIB, working=GIB)
    budget = MemoryEstimate(roles=(role,), cache=GIB, processes=1, saving=12 * GIB, kept=4, flops=1)
    assert budget.peak == ("update actor", 17 * GIB)
    memory, disk = budget.warnings(16 * GIB, 40 * GIB)
    assert "update actor needs about 17.0 GiB in each process, and 16.0 GiB are free" in memory
    assert "4 checkpoints of 12.0 GiB, and 40.0 GiB are free" in disk
    assert list(replace(budget, kept=1).warnings(18 * GIB, 40 * GIB)) == []
    assert list(budget.warnings(None, None)) == []
    assert "update actor 17.00 GiB" in "\n".join(budget.lines())


def of_ppo(*choices: str):
    run = validate(compose_root("ppo", ["actor=tiny_scratch", "critic=tiny_scratch", *choices]))
    return run, estimate_ppo(run)


def named(run, budget) -> set[str]:
    return {remedy.partition("=")[0] for remedy in remedies(run, budget)}


def test_what_is_advised_makes_the_phase_smaller_that_is_short(monkeypatch):
    long = ("rollout.max_new_tokens=30", "data.max_prompt_length=30", "actor.micro_batch_tokens=99999")
    run, budget = of_ppo(*long, "checkpoint=off")
    phase, needed = budget.peak
    assert phase == "update actor"
    assert "actor.micro_batch_tokens" in named(run, budget)
    assert not {name for name in named(run, budget) if name.startswith(("critic", "sharding", "rollout"))}
    helped = replace(run, actor=replace(run.actor, micro_batch_tokens=run.actor.micro_batch_tokens // 16))
    assert estimate_ppo(helped).phases()[phase] < 0.6 * needed

    run, budget = of_ppo("rollout=vllm", "rollout.kv_cache_gib=8")
    assert budget.peak[0] == "generate"
    assert named(run, budget) == {"rollout.kv_cache_gib"}  # no activations, no gradients there

    on_two = ("sharding=fsdp", "trainer.n_gpus_per_node=2", "actor.gradient_checkpointing=true")
    run, budget = of_ppo(*long, *on_two)
    assert "sharding" not in named(run, budget)  # is divided, and all processes share the memory of this machine
    assert "actor.gradient_checkpointing" not in named(run, budget)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    gpu = replace(budget, on_host=False)
    assert "trainer.n_gpus_per_node" not in named(run, gpu)


def test_a_phase_that_no_setting_makes_smaller_is_told_so():
    budget = of_ppo()[1]
    (warning,) = budget.warnings(1, None, None, [])
    assert "take a smaller model" in warning
    assert "micro_batch_tokens" not in warning


def test_every_process_that_holds_a_role_is_counted():
    apart = ("trainer=mesh", "trainer.placement.devices=[cpu:0,cpu:1]", "+trainer.placement.sub_meshes.critic=[cpu:1]")
    budget = of_ppo(*apart)[1]
    assert budget.processes == 2
    assert "processes     2, operations" in "\n".join(budget.lines())
    one = of_ppo()[1]
    apart_, here = budget.phases(), one.phases()
    assert apart_["update critic"] < here["update critic"]  # the actor is elsewhere
    pools = ("trainer=ray", "+trainer.placement.pools={a:[actor,reference],b:[critic]}")
    assert of_ppo(*pools)[1].processes == 2
    joined = ("trainer.nnodes=2", "trainer.placement.address=auto")
    ray = of_ppo("trainer=ray", "sharding=fsdp", "trainer.n_gpus_per_node=4", *joined)[1]
    assert "processes     4 on each of 2 machines" in "\n".join(ray.lines())


def test_what_is_free_is_asked_of_this_machine(tmp_path):
    free = free_memory("cpu", 1)
    assert free is None or free > 2**20
    assert free_disk(tmp_path / "not" / "there" / "yet") > 2**20


@dataclass(frozen=True, kw_only=True)
class EightBitStates(DDP):
    """A sharding of one's own: moments of a byte each, and weights that may rest in half."""

    halved: bool = False

    def cost(self, *args: Any, **kwargs: Any) -> ShardingCost:
        cost = super().cost(*args, **kwargs)
        return replace(cost, weights=cost.weights // (2 if self.halved else 1), optimizer=cost.optimizer // 4)

    def smaller(self) -> Iterator[tuple[str, Sharding]]:
        if not self.halved:
            yield "sharding.halved=true", replace(self, halved=True)


def test_a_sharding_of_ones_own_says_itself_what_it_costs_and_what_makes_it_smaller(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run = validate(
        compose_root(
            "ppo",
            [
                "actor=tiny_scratch",
                "critic=tiny_scratch",
                "sharding=ddp",
                "++trainer.n_gpus_per_node=2",
                "++trainer.device=cuda",
            ],
        )
    )
    own = replace(run, sharding=EightBitStates())
    plain, changed = estimate_ppo(run).roles[0], estimate_ppo(own).roles[0]
    assert (changed.weights, changed.optimizer) == (plain.weights, plain.optimizer // 4)
    offered = dict(budget_module.changes(own, estimate_ppo(own)))
    assert "sharding.halved=true" in offered
    assert estimate_ppo(offered["sharding.halved=true"]()).roles[0].weights == plain.weights // 2
    assert "sharding.cpu_offload=true" not in offered
    fully = replace(run, sharding=FSDP())
    assert dict(budget_module.changes(fully, estimate_ppo(fully)))["sharding.cpu_offload=true"]().sharding.cpu_offload
