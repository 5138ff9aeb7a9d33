"""The budget of a run agrees with what a run takes, and warns where that is more than there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from random_models import save_random_classifier, save_random_model
from same_training import course
from trainer.runs import fit

from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.engines.parallel_degrees import ShardingCost
from verl.engines.sharding import DDP, FSDP, Sharding
from verl.models.model_stats import model_stats
from verl.models.pretrained import Pretrained
from verl.trainer.plan import run_plan
from verl.trainer.plan import run_plan as changes_module
from verl.trainer.plan.memory import GIB, MemoryPlan, RoleMemory, memory_plan
from verl.trainer.plan.run_plan import RunPlan, plan_run
from verl.trainer.plan.workload import device_named, free_disk, free_memory


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


@pytest.mark.exhaustive
def test_a_family_without_a_language_model_head_is_counted_too():
    from transformers import AutoModel, DistilBertConfig

    config = DistilBertConfig(vocab_size=96, dim=32, hidden_dim=64, n_layers=2, n_heads=4)
    assert model_stats(config).parameters == sum(p.numel() for p in AutoModel.from_config(config).parameters())


def estimated(run: Any, device: str = "cpu") -> MemoryPlan:
    return memory_plan(run, device_named(device), counted_below=GIB)


def test_a_plan_that_fails_stops_no_run(model32, tmp_path, monkeypatch, caplog):
    def failing(*_):
        raise KeyError("num_attention_heads")

    monkeypatch.setattr(run_plan, "memory_plan", failing)
    assert fit(course(model32, tmp_path, total_steps=1), tmp_path / "run").status == "finished"
    assert "could not be made: KeyError" in caplog.text


@pytest.mark.exhaustive
def test_an_adapter_and_a_divided_model_take_less():
    def actor(*overrides: str) -> RoleMemory:
        run = validate(compose_root("ppo", ["actor=tiny_scratch", "critic=tiny_scratch", *overrides]))
        return estimated(run).roles[0]

    whole, adapted = actor(), actor("actor.lora={_target_:verl.models.lora.LoRA,rank:4}")
    assert adapted.optimizer < whole.optimizer / 5
    assert adapted.weights >= whole.weights
    shared = actor("sharding=ddp", "+sharding@actor.sharding=fsdp", "trainer.n_gpus_per_node=4")
    assert shared.weights + shared.optimizer == (whole.weights + whole.optimizer) // 4
    assert 0 < shared.gathered < shared.generating == whole.weights


@pytest.mark.exhaustive
def test_processes_that_share_layers_work_on_the_same_rows():
    def plan(*choices):
        run = validate(compose_root("ppo", ["actor=tiny_scratch", "trainer.prompts_per_step=16", *choices]))
        return memory_plan(run, device_named("cpu"))

    one, rows, layers = plan(), *(plan(f"sharding={name}", "trainer.n_gpus_per_node=4") for name in ("ddp", "tp"))
    assert layers.roles[0].tokens == one.roles[0].tokens == 4 * rows.roles[0].tokens
    assert layers.engine_cache == rows.engine_cache == one.engine_cache // 4  # of the own heads, for all rows


def test_processes_of_a_mesh_share_the_memory_of_the_machine():
    tiny = "actor=tiny_scratch"
    mesh = ("trainer=mesh", "sharding=fsdp", "trainer.placement.devices=[cpu:0,cpu:1]")
    assert estimated(validate(compose_root("ppo", [tiny, *mesh]))).processes == 2
    ray = (
        "trainer=ray",
        "sharding=fsdp",
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=2",
        "trainer.placement.address=auto",
    )
    assert estimated(validate(compose_root("ppo", [tiny, *ray]))).processes == 4  # on this machine


def test_a_run_of_supervised_fine_tuning_has_a_budget_too():
    one, two = (
        estimated(validate(compose_root("sft", list(choices))))
        for choices in ((), ("sharding=fsdp", "trainer.n_gpus_per_node=2"))
    )
    assert two.roles[0].weights == one.roles[0].weights // 2
    assert two.roles[0].optimizer == one.roles[0].optimizer // 2
    assert (one.processes, two.processes, one.saving) == (1, 2, two.saving)


def planned(*choices: str, device: str = "cpu", limit: int | None = None) -> RunPlan:
    run = validate(compose_root("ppo", ["actor=tiny_scratch", "critic=tiny_scratch", *choices]))
    return plan_run(run, device_named(device), limit=limit)


@pytest.mark.exhaustive
def test_what_an_asynchronous_save_copies_counts_where_the_copy_lies():
    beside, still = planned("checkpoint=async"), planned("checkpoint=sync")
    saving = beside.memory.saving
    assert beside.memory.copied == saving > still.memory.copied == 0
    assert beside.memory.peak.total - still.memory.peak.total == saving
    on_gpu, offloaded = (
        planned("checkpoint=async", *more, device="h100")
        for more in ([], ["sharding=fsdp", "sharding.cpu_offload=true", "trainer.n_gpus_per_node=2"])
    )
    (warning,) = on_gpu.warnings(None, saving - 1)
    assert warning.startswith("Main memory")
    assert list(on_gpu.warnings(None, saving)) == []
    resting = sum(role.weights + role.optimizer + role.gradients for role in offloaded.memory.roles)
    assert offloaded.memory.host == saving + 2 * resting
    assert offloaded.memory.peak.total < on_gpu.memory.peak.total


def test_an_engine_beside_the_trainer_takes_its_cache_and_its_weights():
    generate = next(p for p in planned("rollout=vllm", "rollout.kv_cache_gib=2").memory.phases if p.name == "generate")
    assert generate.parts["keys and values"] == 2 * GIB
    assert generate.parts["engine weights"] == generate.parts["actor weights"]


def test_a_server_that_generates_takes_nothing_here():
    names = {
        phase.name: phase.parts
        for phase in planned("rollout=server", "rollout.endpoint.base_url=http://127.0.0.1:1").memory.phases
    }
    assert "generate" not in names
    assert not any("keys and values" in parts for parts in names.values())


def test_a_reward_model_is_a_role_that_scores(tmp_path):
    path = save_random_classifier(tmp_path / "rm", "llama", hidden_size=256)
    of_model = planned("reward=model", f"reward.model.path={path}").memory
    rest = next(phase for phase in of_model.phases if phase.name == "rest").parts
    sizes = sum(parameter.numel() for parameter in Pretrained(path=str(path)).load_classifier("cpu").parameters())
    assert rest["reward weights"] == 4 * sizes


def test_a_critic_has_no_output_head():
    rest = next(phase for phase in planned().memory.phases if phase.name == "rest").parts
    roles = planned().memory.roles
    actor, critic = (next(role for role in roles if role.name == name) for name in ("actor", "critic"))
    assert rest["critic weights"] == critic.weights
    update = next(phase for phase in planned().memory.phases if phase.name == "update critic").parts
    assert "logits" not in update
    assert actor.weights >= critic.weights


@pytest.mark.slow
def test_what_may_not_suffice_is_told_with_the_numbers():
    plan = planned("checkpoint.keep_last_n=3", limit=2**20)
    needed = plan.memory.peak.total / GIB
    memory, disk = plan.warnings(1, None)
    assert plan.memory.peak.name in memory
    assert f"{needed:.1f} GiB" in memory
    assert "checkpoint.keep_last_n" in disk
    assert list(planned().warnings(None, None)) == []


def named(plan: RunPlan) -> set[str]:
    return {setting.partition("=")[0] for change in plan.changes for setting in change.settings}


@pytest.mark.exhaustive
def test_what_is_advised_makes_the_phase_smaller_that_is_short():
    long = ("rollout.max_new_tokens=30", "data.max_prompt_length=30", "actor.micro_batch_tokens=99999")
    plan = planned(*long, "checkpoint=off")
    assert plan.memory.peak.name == "update actor"
    short = planned(*long, "checkpoint=off", limit=int(0.8 * plan.memory.peak.total))
    assert "actor.micro_batch_tokens" in named(short)
    for change in short.changes:
        assert (
            planned(*long, "checkpoint=off", *" ".join(change.settings).split()).memory.peak.total == change.peak_bytes
        )

    plan = planned("rollout=vllm", "rollout.kv_cache_gib=32", device="h100", limit=20 * GIB)
    assert plan.memory.peak.name == "generate"
    assert named(plan) == {"rollout.kv_cache_gib"}  # no activations, no gradients there


@pytest.mark.exhaustive
def test_a_phase_that_no_setting_makes_smaller_is_told_so():
    (warning,) = planned(limit=1).warnings(None, None)
    assert "take a smaller model" in warning
    assert "micro_batch_tokens" not in warning


def test_every_process_that_holds_a_role_is_counted():
    apart = ("trainer=mesh", "trainer.placement.devices=[cpu:0,cpu:1]", "+trainer.placement.sub_meshes.critic=[cpu:1]")
    plan, one = planned(*apart), planned()
    assert plan.memory.processes == 2
    assert next(plan.lines()).startswith("2 processes, device")
    update_apart, update_here = (
        next(phase for phase in x.memory.phases if phase.name == "update critic") for x in (plan, one)
    )
    assert update_apart.total < update_here.total  # the actor is elsewhere
    pools = ("trainer=ray", "+trainer.placement.pools={a:[actor,reference],b:[critic]}")
    assert planned(*pools).memory.processes == 2
    joined = ("trainer.nnodes=2", "trainer.placement.address=auto")
    ray = planned("trainer=ray", "sharding=fsdp", "trainer.n_gpus_per_node=4", *joined)
    assert next(ray.lines()).startswith("4 processes on each of 2 machines")


@pytest.mark.exhaustive
def test_a_role_in_a_pool_of_its_own_is_divided_over_that_pool():
    pools = "+trainer.placement.pools={a:[actor,reference],b:[critic]}"
    settings = ("trainer=ray", "sharding=fsdp", "trainer.n_gpus_per_node=4", pools, "+trainer.placement.workers={b:2}")
    plan = planned(*settings)
    roles = {role.name: role for role in plan.memory.roles}
    assert (roles["actor"].layout.processes, roles["critic"].layout.processes) == (4, 2)
    assert roles["critic"].tokens == 2 * roles["actor"].tokens
    whole = {role.name: role.weights for role in planned().memory.roles}
    assert roles["critic"].weights == whole["critic"] // 2
    assert "critic: 192 rows of an optimizer step in 2 shares" in "\n".join(plan.batch)


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
    own, gpu = replace(run, sharding=EightBitStates()), device_named("h100")
    plain, changed = estimated(run, "h100").roles[0], estimated(own, "h100").roles[0]
    assert (changed.weights, changed.optimizer) == (plain.weights, plain.optimizer // 4)
    offered = dict(changes_module.changes(own, estimated(own, "h100"), gpu))
    assert estimated(offered["sharding.halved=true"](), "h100").roles[0].weights == plain.weights // 2
    assert "sharding.cpu_offload=true" not in offered
    fully = replace(run, sharding=FSDP())
    offered = dict(changes_module.changes(fully, estimated(fully, "h100"), gpu))
    assert offered["sharding.cpu_offload=true"]().sharding.cpu_offload
