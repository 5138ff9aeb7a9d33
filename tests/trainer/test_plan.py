"""A plan of a run agrees with the bytes that a run takes, warns where that is more than there is, and what it advises
makes a run fit."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import exhaustive, short_where
from image_models import PLACEHOLDERS, picture, save_image_model
from model_paths.test_images import batch_of, sampled
from random_models import save_random_classifier, save_random_model
from refusals import refusal
from roles import experience, start_actor, with_experience
from same_training import course
from trainer.runs import fit
from typer.testing import CliRunner

from verl.cli.main import app
from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.compose.warm_start import with_architectures
from verl.engines.parallel_degrees import ShardingCost
from verl.engines.sharding import DDP, FSDP, Sharding
from verl.models.lora import LoRA
from verl.models.model_stats import model_stats
from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rollout import auto
from verl.rollout.hf import HFRollout
from verl.trainer.plan import run_plan
from verl.trainer.plan.activations import LiveBytes, trace_activations
from verl.trainer.plan.memory import GIB, MemoryPlan, memory_plan
from verl.trainer.plan.run_plan import RunPlan, plan_run
from verl.trainer.plan.step_time import active_parameters
from verl.trainer.plan.workload import DEVICES, device_named
from verl.trainer.setup import prepare_context
from verl.utils.memory import computes_bfloat16

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "max_position_embeddings": 256}
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


@pytest.fixture
def llama_8b(tmp_path):
    """A directory that holds the architecture alone."""
    (tmp_path / "8b").mkdir()
    (tmp_path / "8b" / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path / "8b"


def run_of(*overrides):
    return validate(compose_root("ppo", list(overrides)))


def planned_8b(directory, device="h100", *overrides):
    roles = ["actor=llama8b", f"actor.model.path={directory}", "critic=none", "algorithm=grpo"]
    sizes = ["++data.max_prompt_length=1024", "rollout.max_new_tokens=1024"]
    return plan_run(run_of(*roles, *sizes, *overrides), device_named(device))


MORE_FAMILIES = ("qwen2", "mixtral", "gemma2", "gpt2", "gptj", "falcon", "mamba", "lfm2")


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [True, *exhaustive(False)])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", *exhaustive("gpt_neox", "opt", *MORE_FAMILIES)])
def test_activations_are_those_that_a_real_model_keeps(tmp_path, family, recomputed):
    from transformers import AutoModel

    path = save_random_model(tmp_path, family, torch.float32, **SHAPE)
    model = AutoModel.from_pretrained(path).train()
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with LiveBytes() as counted:
        counted.watch(model)
        hidden = model(input_ids=torch.zeros(1, 200, dtype=torch.long), use_cache=False)[0]
        hidden.backward(torch.ones_like(hidden))
    found = trace_activations(model.config, 200, torch.float32, recomputed=recomputed)
    assert found.training == pytest.approx(counted.peak, rel=0.1)


def test_a_model_that_cannot_be_traced_is_counted_and_the_plan_says_so(tmp_path, monkeypatch):
    from verl.trainer.plan import activations

    monkeypatch.setattr(activations, "traced_activations", lambda *_, **__: 1 / 0)
    path = save_random_model(tmp_path, "llama", torch.float32, num_hidden_layers=4, hidden_size=40)
    roles = ["actor=pretrained", f"actor.model.path={path}", "critic=none", "algorithm=grpo"]
    plan = plan_run(run_of(*roles, "++data.max_prompt_length=16"), device_named("cpu"))
    assert [line for line in plan.lines() if line.startswith("activations of actor")]
    assert plan.memory.peak.parts["activations"] > 0


QUICKSTART = {**SHAPE, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}  # actor=tiny
OF_88M = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
LARGE = {f"88M {family}": {"family": family, **OF_88M} for family in ("llama", "qwen3", "mistral")}
SIZES = {"narrow": SHAPE, "quickstart": QUICKSTART, **LARGE}
SMALL = [("narrow", True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recomputed"), [*SMALL, *(pytest.param(name, False, marks=pytest.mark.exhaustive) for name in SIZES)]
)
def test_an_update_of_the_actor_takes_what_the_plan_says(tmp_path, name, recomputed, record_property):
    shape = {"family": "qwen2", "max_position_embeddings": 256, **SIZES[name]}
    path = save_random_model(tmp_path, shape.pop("family"), torch.float32, **shape)
    rollout = HFRollout(max_new_tokens=64, min_new_tokens=64)
    actor = start_actor(Pretrained(path=str(path)), rollout, gradient_checkpointing=recomputed)
    prompts = DataProto.from_dict(
        {
            "prompts": torch.randint(4, 60, (8, 64)),
            "prompt_mask": torch.ones(8, 64, dtype=torch.bool),
            "prompt_ids": torch.arange(8),
            "group_ids": torch.arange(8),
        }
    )
    batch = experience(actor, prompts, 2)
    actor.update(batch)  # the optimizer has its state from here on
    with LiveBytes() as counted:
        counted.watch(actor.model)
        actor.update(batch)
    held = [list(actor.model.parameters()), [p.grad for p in actor.model.parameters()]]
    held.append([x for state in actor.engine.optimizer.state.values() for x in state.values()])
    resting = sum(x.nbytes for tensors in held for x in tensors)
    roles = ["actor=pretrained", f"actor.model.path={path}", "critic=none", "algorithm=grpo", "reference=none"]
    roles.append("actor.autocast=null")
    sizes = ["trainer.prompts_per_step=8", "trainer.group_size=2", "++data.max_prompt_length=64", "checkpoint=off"]
    more = ["rollout.max_new_tokens=64", "algorithm.kl.coef=0", f"actor.gradient_checkpointing={recomputed}"]
    plan = plan_run(run_of(*roles, *sizes, *more), device_named("cpu"))
    update = next(phase for phase in plan.memory.phases if phase.name == "update actor")
    record_property(
        "parameters, tracked and planned bytes", (actor.model.num_parameters(), resting + counted.peak, update.total)
    )
    assert update.parts["activations"] + update.parts.get("logits", 0) == pytest.approx(counted.peak, rel=0.1)
    assert update.total == pytest.approx(resting + counted.peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [None, *exhaustive(())])
def test_an_update_on_images_takes_what_the_plan_says(tmp_path, freeze):
    path = save_image_model(tmp_path / "model", "qwen2_5_vl")
    source = Pretrained(path=str(path), images=True, freeze=freeze)
    actor = start_actor(source, HFRollout(max_new_tokens=16, min_new_tokens=16))
    text = 8 * PLACEHOLDERS["qwen2_5_vl"]
    prompts = batch_of(actor.tokenizer, [(text, [picture(8 * i + j, 32, 32) for j in range(8)]) for i in range(8)])
    actor.update(batch := with_experience(sampled(actor, prompts, 2), actor))
    with LiveBytes() as counted:
        counted.watch(actor.model)
        actor.update(batch)
    roles = ["actor=pretrained", f"actor.model.path={path}", "actor.model.images=true", "critic=none", "reference=none"]
    roles += ["algorithm=grpo", "actor.autocast=null", "actor.model.freeze=" + ("null" if freeze is None else "[]")]
    sizes = [
        "trainer.prompts_per_step=8",
        "trainer.group_size=2",
        f"++data.max_prompt_length={prompts['prompts'].shape[1]}",
    ]
    more = ["rollout.max_new_tokens=16", "algorithm.kl.coef=0", "checkpoint=off"]
    plan = plan_run(run_of(*roles, *sizes, *more), device_named("cpu"))
    update = next(phase for phase in plan.memory.phases if phase.name == "update actor")
    planned = sum(update.parts.get(part, 0) for part in ("activations", "logits", "pixels"))
    assert planned == pytest.approx(counted.peak, rel=0.15)  # of three layers, beside which embeddings count
    assert update.parts["pixels"] == pytest.approx(sum(x.values.nbytes for x in batch.ragged.values()), rel=0.15)


@pytest.mark.slow
def test_8b_fits_on_eight_devices_and_names_its_parts(llama_8b):
    plan = planned_8b(llama_8b, "h100", "rollout=vllm", "sharding=fsdp", "trainer.n_gpus_per_node=8")
    phases = {phase.name: phase.parts for phase in plan.memory.phases}
    weights = model_stats(plan.memory.roles[0].config).parameters
    assert plan.fits
    assert not plan.changes
    assert phases["rest"]["actor weights"] == pytest.approx(4 * weights / 8, rel=0.01)
    assert phases["rest"]["actor optimizer"] == pytest.approx(8 * weights / 8, rel=0.01)
    assert phases["generate"]["engine weights"] == pytest.approx(2 * weights, rel=0.01)
    assert "engine weights" not in phases["update actor"]  # the engine sleeps
    cache = phases["generate"]["keys and values"]  # what is left beside the rest
    assert 30 * GIB < cache < plan.memory.limit
    assert 20 * GIB < plan.memory.peak.total - cache < 50 * GIB


@pytest.mark.slow
def test_an_engine_that_is_chosen_is_planned_and_sleeps_only_where_it_must(llama_8b, monkeypatch):
    monkeypatch.setattr(auto, "vllm_fault", lambda is_gpu: None)
    small = ["actor=pretrained", f"actor.model.path={llama_8b}", "+actor.lora.rank=8"]
    small += ["critic=none", "algorithm=grpo", "actor.model.dtype=bfloat16", "actor.micro_batch_tokens=2048"]
    named, chosen = (run_of(*small, f"rollout={name}") for name in ("vllm", "auto"))
    plans = [plan_run(run, device_named("h200")) for run in (named, chosen)]
    assert plans[0].memory == plans[1].memory
    assert plans[1].decided(chosen).rollout.planned(is_gpu=True).sleep is not plans[1].memory.stays_awake


@pytest.mark.slow
def test_gradients_that_are_reduced_once_per_update_take_more_memory_and_less_traffic(llama_8b):
    common = ["rollout=vllm", "sharding=fsdp", "trainer.n_gpus_per_node=8", "actor.micro_batch_tokens=4096"]
    each = planned_8b(llama_8b, "h100", *common)
    once = planned_8b(llama_8b, "h100", *common, "sharding.reduce_gradients=update")
    less, most = (next(x.total for x in p.memory.phases if x.name == "update actor") for p in (each, once))
    assert most - less == pytest.approx(4 * each.memory.roles[0].sizes.parameters, rel=1e-6)
    more, fewer = (next(x.sent_bytes for x in p.stages if x.name == "update actor") for p in (each, once))
    assert fewer < more


@pytest.mark.slow
def test_what_does_not_fit_is_told_with_changes_that_make_it_fit(llama_8b):
    common = ["rollout=vllm", "sharding=fsdp", "trainer.n_gpus_per_node=8", "actor.gradient_checkpointing=false"]
    plan = planned_8b(llama_8b, "a100-40", *common, "trainer.prompts_per_step=512")
    assert not plan.fits
    assert 1 <= len(plan.changes) <= 3
    for change in plan.changes:
        again = planned_8b(llama_8b, "a100-40", *common, "trainer.prompts_per_step=512", *change.split())
        assert again.fits
    assert "does not fit" in "\n".join(plan.lines())


def test_only_the_chosen_experts_are_counted_in_the_products(tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(save_random_model(tmp_path, "qwen3_moe", torch.float32))
    sizes = model_stats(config)
    unused = sizes.layers * (config.num_experts - 2) * 3 * sizes.hidden * config.moe_intermediate_size
    assert active_parameters(sizes) == sizes.parameters - sizes.vocabulary * sizes.hidden - unused


def test_batch_arithmetic_names_every_remainder():
    run = run_of("algorithm=grpo", "critic=none", "sharding=ddp", "trainer.n_gpus_per_node=5")
    run = replace(run, trainer=replace(run.trainer, prompts_per_step=6, group_size=2))
    step, actor = plan_run(with_architectures(run), device_named("cpu")).batch
    assert "6 prompts x 2 samples = 12 rows;" in step
    assert "12 rows of an optimizer step in 5 shares with a remainder of 2" in actor


def test_the_command_plans_the_default_run_and_gives_its_numbers():
    found = CliRunner().invoke(app, ["plan", "--json", "--device", "cpu"])
    assert found.exit_code == 0, found.output
    plan = json.loads(found.stdout)
    assert plan["fits"]
    assert plan["peak"]["bytes"] == max(phase["bytes"] for phase in plan["phases"])
    assert plan["step_seconds"] == pytest.approx(sum(stage["seconds"] for stage in plan["stages"]))


@pytest.mark.slow
def test_the_command_ends_with_1_where_a_run_does_not_fit(llama_8b):
    arguments = ["plan", "actor=llama8b", f"actor.model.path={llama_8b}", "critic=none", "algorithm=grpo"]
    found = CliRunner().invoke(app, [*arguments, "--device", "rtx4090"])
    assert found.exit_code == 1
    assert "does not fit" in found.stdout


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("fits", [True, *exhaustive(False)])
@pytest.mark.parametrize("device", short_where([*DEVICES, "cpu"], {"h100", "cpu"}.__contains__))
def test_fine_tuning_is_planned_on_every_device(llama_8b, device, fits):
    large = ["actor=llama8b", f"actor.model.path={llama_8b}", "actor.micro_batch_tokens=262144"]
    run = validate(compose_root("sft", [] if fits else [*large, "trainer.batch_size=4096"]))
    plan = plan_run(run, device_named(device))
    assert device == "cpu" or plan.fits is fits
    assert [phase.name for phase in plan.memory.phases] == ["rest", "update actor"]
    assert plan.device.name in "\n".join([*plan.lines(), *plan.warnings(0, 0), plan.summary()])


def test_fine_tuning_that_starts_on_a_gpu_has_a_plan_and_no_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(run_plan, "free_memory", lambda device, processes: 70 * GIB)
    monkeypatch.setattr(run_plan, "device_here", lambda device: device_named("h100"))
    run = validate(compose_root("sft", ["checkpoint=off"]))
    plan = run_plan.log_plan(run, BuildContext(device="cuda:0", run_dir=tmp_path), tmp_path)
    assert plan is not None
    assert caplog.messages == []
    assert "update actor" in (tmp_path / "plan.txt").read_text()


def test_a_run_that_starts_counts_small_activations_and_traces_large_ones(monkeypatch, tmp_path):
    run, context = validate(compose_root("sft", ["checkpoint=off"])), BuildContext(run_dir=tmp_path)
    for limit, is_counted in ((70 * GIB, True), (GIB // 4, False)):
        monkeypatch.setattr(run_plan, "free_memory", lambda device, processes, limit=limit: limit)
        plan = run_plan.log_plan(run, context, tmp_path)
        assert plan is not None
        (role,) = plan.memory.roles
        assert (role.activations.why_counted is not None) == is_counted
    traced = role.activations.training
    counted = plan_run(run, device_named("cpu"), limit=GIB, counted_below=GIB).memory.roles[0].activations.training
    assert counted == pytest.approx(traced, rel=0.5)


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(("device", "dtype"), [("h100", torch.bfloat16), ("cpu", torch.float32)])
@pytest.mark.parametrize("root", ["sft", *exhaustive("ppo")])
def test_a_pretrained_model_computes_in_bfloat16_with_float32_weights_on_a_gpu(tmp_path, root, device, dtype):
    path = save_random_model(tmp_path, "llama", torch.float32)
    short = ["++data.max_prompt_length=16"] if root == "ppo" else []
    run = validate(compose_root(root, ["actor=pretrained", f"actor.model.path={path}", *short]))
    plan = plan_run(run, device_named(device))
    assert {role.dtype for role in plan.memory.roles} == {dtype}
    copy = 0 if dtype == torch.float32 else 2  # in the type of the computation
    parameters = model_stats(plan.memory.roles[0].config).parameters
    assert plan.memory.phases[0].parts["actor weights"] == (4 + copy) * parameters
    assert str(dtype).removeprefix("torch.") in plan.summary()


@pytest.mark.parametrize(("can", "autocast"), [(True, "bfloat16"), (False, None)])
def test_what_auto_computes_in_is_decided_in_the_process_that_has_the_device(can, autocast, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: can)
    assert computes_bfloat16("cuda:0") is can
    assert not computes_bfloat16("cpu")
    actor = validate(compose_root("ppo", ["actor=pretrained", "actor.model.path=somewhere"])).actor
    assert actor.autocast == "auto"
    assert actor.on_device(can).autocast == autocast
    narrow = replace(actor, model=replace(actor.model, dtype="bfloat16"), lora=LoRA())
    assert narrow.on_device(can).autocast is None  # its weights say it
    assert replace(actor, autocast=None).on_device(can).autocast is None


MIXTURE = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "max_position_embeddings": 40960,
}  # fmt: skip
PUBLISHED = {  # Llama 3.1 8B, Qwen3 32B, 30B-A3B, 235B-A22B on H100s: seconds of a step, and what the plan says
    "8B": (97.7, 103.7, 2, "sharding=fsdp", 1, (64, 4096, 1060, 4), LLAMA_8B),
    "32B": (393, 373, 4, "sharding=parallel sharding.tp=4 sharding.dp_shard=8", 4, (64, 4096, 3206, 4), {
        "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 25600,
        "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
    }),
    "30B-A3B": (225, 110, 4, "sharding=parallel sharding.ep=8 sharding.dp_shard=32", 4, (64, 4096, 3154, 4), {
        **MIXTURE, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "moe_intermediate_size": 768,
    }),
    "235B-A22B": (506, 224, 16, "sharding=parallel sharding.ep=16 sharding.dp_shard=128", 16, (16, 8192, 5671, 1), {
        **MIXTURE, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
        "num_attention_heads": 64, "moe_intermediate_size": 1536,
    }),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8B", *exhaustive("32B", "30B-A3B", "235B-A22B")])
def test_published_steps_are_within_the_range_of_the_plan_and_the_document_has_the_error_of_each(name, tmp_path):
    """Table of NeMo RL 0.4, on policy: prompts x 32 samples, greatest and average tokens of a row, optimizer steps."""
    checkpoint, expected, nodes, sharding, siblings, (prompts, longest, average, updates), config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    hosts = ["trainer=ray", "trainer.placement.address=auto", f"++trainer.nnodes={nodes}"]
    hosts.append("++trainer.n_gpus_per_node=8")
    run = run_of(
        "actor=llama8b", f"actor.model.path={tmp_path}", "critic=none", "algorithm=grpo", "rollout=vllm", *hosts,
        *sharding.split(), f"rollout.tensor_parallel_size={siblings}", f"algorithm.mini_batches={updates}",
        f"++trainer.prompts_per_step={prompts}", "++trainer.group_size=32", "++data.max_prompt_length=128",
        f"rollout.max_new_tokens={longest - 128}", "rollout.max_num_seqs=512",
    )  # fmt: skip
    plan = plan_run(run, device_named("h100"), response=average - 128)
    assert plan.step_s == pytest.approx(expected, rel=0.01)
    assert plan.range_s[0] <= checkpoint <= plan.range_s[1]
    assert "for published steps" in "\n".join(plan.lines())
    document = (Path(__file__).parents[2] / "docs" / "results.md").read_text()
    assert f"| {checkpoint:g} | {expected:.0f} | {expected / checkpoint - 1:+.0%} |" in document


MEASURED = {  # one H200, vLLM awake, 32 x 8 rows: new tokens, tokens of a micro-batch, seconds of stages, configuration
    "135M": (48, 16384, {"generate": 0.34, "update actor": 0.21, "sync": 0.20}, {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    }),
    "1.5B": (256, 32768, {"generate": 2.43, "update actor": 1.92, "sync": 0.50}, {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }),
}  # fmt: skip


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("name", MEASURED)
def test_stages_measured_on_one_gpu_are_within_a_quarter_of_the_plan(name, tmp_path):
    new, tokens, stages, config = MEASURED[name]
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    run = run_of(
        "actor=pretrained", f"actor.model.path={tmp_path}", "actor.autocast=bfloat16", "critic=none", "algorithm=grpo",
        "reference=none", "algorithm.kl.coef=0", "rollout=vllm", "rollout.max_num_seqs=256",
        f"rollout.max_new_tokens={new}", f"actor.micro_batch_tokens={tokens}", "++trainer.prompts_per_step=32",
        "++trainer.group_size=8", "++data.max_prompt_length=64",
    )  # fmt: skip
    plan = plan_run(run, device_named("h200"))
    assert plan.memory.stays_awake
    found = {stage.name: stage.seconds for stage in plan.stages}
    for stage, seconds in stages.items():
        assert found[stage] == pytest.approx(seconds, rel=0.25)


def test_a_run_on_two_machines_is_planned_on_one_and_refused_there_before_anything_loads(tmp_path):
    run = run_of("trainer.nnodes=2", "sharding=ddp")
    assert plan_run(with_architectures(run), device_named("h100")).memory.machines == 2
    with refusal("trainer.nnodes"):
        prepare_context(BuildContext(run_dir=tmp_path / "run"), run.trainer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "tpu"], "--device is 'tpu'"),
        (["trainer.group_siez=2"], "trainer.group_size"),
        (["algorithm.mini_batches=0"], "algorithm.mini_batches is 0"),
        (["algorithm=grop"], "grpo"),
    ],
)
def test_faults_are_told_as_a_run_tells_them(arguments, told):
    found = CliRunner().invoke(app, ["plan", *arguments])
    assert found.exit_code == 2
    assert told in found.stderr


# Small models: parts, roles, processes, advice


TINY = ("actor=tiny_scratch", "critic=tiny_scratch")


def estimated(run: Any, device: str = "cpu") -> MemoryPlan:
    return memory_plan(run, device_named(device), counted_below=GIB)


def planned(*choices: str, device: str = "cpu", limit: int | None = None) -> RunPlan:
    return plan_run(run_of(*TINY, *choices), device_named(device), limit=limit)


def test_a_plan_that_fails_stops_no_run(model32, tmp_path, monkeypatch, caplog):
    def failing(*_):
        raise KeyError("num_attention_heads")

    monkeypatch.setattr(run_plan, "memory_plan", failing)
    assert fit(course(model32, tmp_path, total_steps=1), tmp_path / "run").status == "finished"
    assert "could not be made: KeyError" in caplog.text


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
    phases = planned("rollout=server", "rollout.endpoint.base_url=http://127.0.0.1:1").memory.phases
    assert not any(phase.name == "generate" or "keys and values" in phase.parts for phase in phases)


@pytest.mark.slow
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
    return {change.partition("=")[0] for change in plan.changes}


@pytest.mark.exhaustive
def test_what_is_advised_makes_the_phase_smaller_that_is_short():
    long = ("rollout.max_new_tokens=30", "data.max_prompt_length=30", "actor.micro_batch_tokens=99999")
    run = run_of("actor=tiny_scratch", "critic=none", "algorithm=grpo", "checkpoint=off", *long)
    plan = plan_run(run, device_named("cpu"))
    assert plan.memory.peak.name == "update actor"
    short = plan_run(run, device_named("cpu"), limit=int(0.8 * plan.memory.peak.total))
    assert "actor.micro_batch_tokens" in named(short)

    plan = planned("rollout=vllm", "rollout.kv_cache_gib=32", device="h100", limit=20 * GIB)
    assert plan.memory.peak.name == "generate"
    assert named(plan) == {"rollout.kv_cache_gib"}  # no activations, no gradients there


@pytest.mark.slow
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
    run = run_of(*TINY, "sharding=ddp", "++trainer.n_gpus_per_node=2", "++trainer.device=cuda")
    own, gpu = replace(run, sharding=EightBitStates()), device_named("h100")
    plain, changed = estimated(run, "h100").roles[0], estimated(own, "h100").roles[0]
    assert (changed.weights, changed.optimizer) == (plain.weights, plain.optimizer // 4)
    offered = dict(run_plan.changes(own, estimated(own, "h100"), gpu))
    assert estimated(offered["sharding.halved=true"](), "h100").roles[0].weights == plain.weights // 2
    assert "sharding.cpu_offload=true" not in offered
    fully = replace(run, sharding=FSDP())
    offered = dict(run_plan.changes(fully, estimated(fully, "h100"), gpu))
    assert offered["sharding.cpu_offload=true"]().sharding.cpu_offload


def test_a_model_whose_layers_cannot_be_counted_is_refused(tmp_path):
    shape = {"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = ["plan", "actor=pretrained", f"actor.model.path={tmp_path}", "algorithm=grpo", "critic=none"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "num_attention_heads" in result.output
    assert not result.exception or isinstance(result.exception, SystemExit)
