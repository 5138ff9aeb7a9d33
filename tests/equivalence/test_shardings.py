"""However a model's weights are divided over processes, it learns what one process teaches it, to float64 rounding."""

import dataclasses

import pytest
import torch
from cases import exhaustive, short_where
from equivalence.one_update import one_update, rows_with_holes
from random_models import save_random_model
from safetensors.torch import load_file
from same_training import ROUNDING, run_course, same_but_for_rounding, same_training
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, fit, ppo_run

from verl.algorithms.distillation import Distillation
from verl.algorithms.kl import NoKL
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.checkpoint import open_checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.lazy_tensors import as_tensor
from verl.checkpoint.read.reader import CheckpointReader
from verl.component import BuildContext
from verl.engines.sharding import DDP, FSDP, HSDP, TP, TPFSDP, NoSharding, Parallel
from verl.models.lora import LoRA
from verl.models.model_stats import model_stats
from verl.models.pretrained import Pretrained
from verl.rollout.scripted import ScriptedRollout
from verl.workers.reference import Reference

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]

SHARDINGS = {
    "ddp": DDP(),
    "fsdp": FSDP(),
    "shard_grad_op": FSDP(strategy="SHARD_GRAD_OP"),
    "offload": FSDP(cpu_offload=True),
    "hsdp": HSDP(),
    "tp": TP(tensor_parallel=2),  # and two shares of rows
    "tp_fsdp": TPFSDP(),
}


def names(*all_of_them: str, short: tuple[str, ...]):
    """Shardings; `make test` tries some of them in each test, and all of them in some test."""
    return pytest.mark.parametrize("name", short_where(all_of_them, short.__contains__))


# 5, 4 and 1 responses: counts that do not divide, shares without rows
PROMPTS = [[0, 1, 2, 3, 4], [7, 6, 5, 2], [3]]


@pytest.fixture(scope="module")
def bench(four_processes):
    return four_processes


@pytest.fixture(scope="module")
def tied64(tmp_path_factory):
    """The float64 model, with its embedding for an output head."""
    path = tmp_path_factory.mktemp("models") / "tied"
    save_random_model(path, "starcoder2", torch.float64, tie_word_embeddings=True)
    return Pretrained(path=str(path), dtype="float64")


@pytest.fixture(scope="module")
def alone(model64, tmp_path_factory):
    """What one process comes to."""
    return run_course(ppo_run(model64, PPO_ALGORITHM, group_size=1), PROMPTS, tmp_path_factory.mktemp("one"))


@names(*SHARDINGS, short=("hsdp",))  # tp_fsdp: with an adapter, below
def test_four_processes_train_as_one_does(name, bench, alone, model64, tmp_path):
    run = ppo_run(
        model64, PPO_ALGORITHM, group_size=1, sharding=SHARDINGS[name], n_gpus_per_node=4, micro_batch_tokens=40
    )
    same_training(alone, bench.course(run, PROMPTS, tmp_path).result(timeout=120), ROUNDING)


@names("tp", "hsdp", "tp_fsdp", short=("tp",))
def test_processes_without_rows_add_nothing_to_the_gradients_of_a_tied_model(name, bench, tied64):
    """Under tensor parallelism torch gives some gradients in another layout than their parameter's."""
    rows, sharding = rows_with_holes([4], 1, [7]), SHARDINGS[name]
    wanted = one_update(tied64, NoSharding().build(BuildContext()), rows)
    for found in bench.updated(tied64, sharding, rows, {}).result(timeout=120):
        gaps = {key: float((x - wanted[key]).abs().max()) for key, x in found.items()}
        assert {key: gap for key, gap in gaps.items() if not gap <= 1e-9} == {}


@names("fsdp", "shard_grad_op", "offload", "hsdp", "tp_fsdp", short=("fsdp",))
def test_gradients_that_are_reduced_once_per_update_are_those_of_one_process(name, bench, tied64):
    """One of the processes has fewer micro-batches than the others, so that it adds an empty one at the end."""
    rows = rows_with_holes([4, 4, 4, 4, 4], 2, [7, 3])
    sharding = dataclasses.replace(SHARDINGS[name], reduce_gradients="update")
    wanted = one_update(tied64, NoSharding().build(BuildContext()), rows, exact=True)
    for found in bench.updated(tied64, sharding, rows, {"tokens": 12, "exact": True}).result(timeout=120):
        gaps = {key: float((x - wanted[key]).abs().max()) for key, x in found.items()}
        assert {key: gap for key, gap in gaps.items() if not gap <= 1e-12} == {}


@pytest.mark.parametrize(
    ("actor", "critic", "reference"),
    [
        pytest.param("fsdp", "tp", "ddp", marks=pytest.mark.exhaustive),
        pytest.param("tp", "hsdp", None, marks=pytest.mark.exhaustive),
        pytest.param(None, "tp_fsdp", "tp", marks=pytest.mark.exhaustive),
    ],
)
def test_roles_that_are_each_divided_in_their_own_way_train_as_one_process_does(
    actor, critic, reference, bench, alone, model64, tmp_path
):
    run = ppo_run(model64, PPO_ALGORITHM, group_size=1, sharding=DDP(), n_gpus_per_node=4, micro_batch_tokens=40)
    own = {"actor": actor, "critic": critic, "reference": reference}
    parts = {
        role: dataclasses.replace(getattr(run, role), sharding=SHARDINGS[name]) for role, name in own.items() if name
    }
    same_training(
        alone, bench.course(dataclasses.replace(run, **parts), PROMPTS, tmp_path).result(timeout=120), ROUNDING
    )


@names("fsdp", "hsdp", "tp", "tp_fsdp", "ddp", short=("fsdp",))
def test_the_cost_model_tells_what_each_process_holds(name, bench, tmp_path):
    path = save_random_model(tmp_path / "model", "llama", torch.float32, hidden_size=128, num_key_value_heads=2)
    model, sharding = Pretrained(path=str(path)), SHARDINGS[name]
    cost = sharding.cost(4, model_stats(model.load_config()))
    run = ppo_run(model, dataclasses.replace(GRPO_ALGORITHM, mini_batches=1), sharding=sharding, n_gpus_per_node=4)
    for held in bench.held(run, [0, 1], tmp_path / "runs").result(timeout=120):
        assert held["weights"] == pytest.approx(cost.weights, rel=0.05)
        assert held["optimizer"] == pytest.approx(cost.optimizer, rel=0.05)


@names("ddp", "fsdp", "hsdp", "tp", short=("ddp",))
def test_in_float32_losses_and_gradients_differ_by_rounding_alone(name, bench, model32, tmp_path):
    def run(**parts):
        rollout = ScriptedRollout(max_new_tokens=7, texts=("12", "7*7=49", "0"))
        return ppo_run(model32, PPO_ALGORITHM, rollout=rollout, group_size=1, lr=1e-4, **parts)

    alone = run_course(run(), PROMPTS, tmp_path / "one")
    found = bench.course(run(sharding=SHARDINGS[name], n_gpus_per_node=4), PROMPTS, tmp_path / "four").result()
    same_but_for_rounding(alone, found)


@names("fsdp", "tp", "tp_fsdp", short=("tp_fsdp",))
def test_a_teacher_and_its_student_are_divided_alike(name, bench, model64, tied64, tmp_path):
    distill = Distillation(divergence="jsd", top_k=6, coef=0.5)

    def run(**parts):
        algorithm = dataclasses.replace(GRPO_ALGORITHM, kl=NoKL(), distill=distill)
        return ppo_run(model64, algorithm, group_size=3, reference=Reference(model=tied64), **parts)

    prompts = [[2, 0, 5], [1]]
    together = run(sharding=SHARDINGS[name], n_gpus_per_node=4)
    alone = run_course(run(), prompts, tmp_path / "one")
    assert all(line["distill/divergence_nats"] > 0.01 for line in alone.metrics.values())
    same_training(alone, bench.course(together, prompts, tmp_path).result(), ROUNDING)


def test_gradients_are_added_up_whatever_their_size(bench):
    shapes = [(3,), (400, 500), (300_000,), (1, 300_000), (2, 2), (500_000,)]  # alone, together, not in one piece
    for found in bench.summed(shapes).result(timeout=120):
        assert [tuple(grad.shape) for grad in found] == shapes
        assert [set(grad.unique().tolist()) for grad in found] == [{6.0}] * 5 + [{2.0}]  # 0 + 1 + 2 + 3; 0 + 2


def with_actor(run, **options):
    """The run with another actor."""
    return dataclasses.replace(run, actor=dataclasses.replace(run.actor, **options))


@names("fsdp", "hsdp", "tp", "tp_fsdp", short=("tp_fsdp",))
def test_an_adapter_learns_the_same_and_its_frozen_model_is_the_reference(name, bench, model64, tmp_path):
    def run(**parts):
        return with_actor(ppo_run(model64, GRPO_ALGORITHM, group_size=3, **parts), lora=LoRA(rank=2))

    prompts = [[2, 0, 5], [1]]
    together = run(sharding=SHARDINGS[name], n_gpus_per_node=4)
    same_training(
        run_course(run(), prompts, tmp_path / "one"), bench.course(together, prompts, tmp_path).result(), ROUNDING
    )


@pytest.mark.parametrize(
    ("family", "name", "experts"),
    [
        ("mixtral", "ep", 4),
        pytest.param("qwen3_moe", "tp", 4, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", "tp_fsdp", 4, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", "tp", 3, marks=pytest.mark.exhaustive),  # each process has all of them
        pytest.param("qwen2_moe", "tp", 4, marks=pytest.mark.exhaustive),  # beside an expert that all tokens go to
        pytest.param("mixtral", "tp", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_a_mixture_of_experts_is_divided_expert_by_expert_and_learns_the_same(family, name, experts, bench, tmp_path):
    number = {"num_local_experts" if family == "mixtral" else "num_experts": experts}
    path = save_random_model(tmp_path / "model", family, torch.float64, **number)
    model = Pretrained(path=str(path), dtype="float64")
    alone = run_course(ppo_run(model, PPO_ALGORITHM, group_size=1), PROMPTS, tmp_path / "one")
    sharding = SHARDINGS[name] if name in SHARDINGS else Parallel(ep=2)  # whose experts are then divided over two
    together = ppo_run(model, PPO_ALGORITHM, group_size=1, sharding=sharding, n_gpus_per_node=4, micro_batch_tokens=40)
    found = bench.course(together, PROMPTS, tmp_path / "four").result()
    if name.startswith("tp"):  # a process does not see what all routers choose
        alone.metrics = {
            n: {k: x for k, x in line.items() if k in found.metrics[n]} for n, line in alone.metrics.items()
        }
    same_training(alone, found, ROUNDING)
    for key, x in load_file(path / "model.safetensors").items():
        moved = (alone.weights[f"actor/model.safetensors:{key}"] - x).abs().max()
        assert moved > 1e-3 or "experts" not in key, key


@names("tp", "tp_fsdp", short=("tp",))
def test_an_engine_is_given_a_divided_adapter_as_peft_merges_it_and_as_it_is(name, bench, model64, tmp_path):
    made = ppo_run(model64, GRPO_ALGORITHM, group_size=3, sharding=SHARDINGS[name], n_gpus_per_node=4, lr=0.1)
    run = with_actor(made, lora=LoRA(rank=2))
    given = bench.sent(run, [2, 0, 5], tmp_path).result()
    saved = Pretrained(path=str(tmp_path / "0/actor"), dtype="float64").load_causal_lm("cpu").state_dict()
    start = model64.load_causal_lm("cpu").state_dict()
    for key, x in saved.items():
        torch.testing.assert_close(given.pop(key), x, rtol=0, atol=1e-12)
        is_adapted = f"{key.removesuffix('.weight')}.lora_B" in given
        assert torch.equal(x, start[key]) != is_adapted, key
    for path, b in ((key.removesuffix(".lora_B"), x) for key, x in given.items() if key.endswith("lora_B")):
        delta = saved[f"{path}.weight"] - start[f"{path}.weight"]
        torch.testing.assert_close(b @ given[f"{path}.lora_A"], delta, rtol=0, atol=1e-12)


@pytest.mark.exhaustive
@names("fsdp", "tp", "tp_fsdp", short=("fsdp",))
def test_tied_weights_stay_tied_and_recomputed_activations_change_nothing(name, bench, tied64, tmp_path):
    def run(**parts):
        return with_actor(ppo_run(tied64, GRPO_ALGORITHM, group_size=3, **parts), gradient_checkpointing=bool(parts))

    prompts = [[2, 0, 5], [1]]
    alone = run_course(run(), prompts, tmp_path / "one")
    assert not any("lm_head" in key for key in alone.weights)
    together = run(sharding=SHARDINGS[name], n_gpus_per_node=4)
    same_training(alone, bench.course(together, prompts, tmp_path).result(), ROUNDING)


@names("tp", "tp_fsdp", short=())
def test_norms_over_the_heads_of_one_process_get_the_gradient_of_all_heads(name, bench, tmp_path):
    path = save_random_model(tmp_path / "qwen3", "qwen3", torch.float64)
    model, prompts = Pretrained(path=str(path), dtype="float64"), [[2, 0, 5]]

    def run(**parts):
        return ppo_run(
            model, dataclasses.replace(GRPO_ALGORITHM, mini_batches=1), group_size=3, micro_batch_tokens=40, **parts
        )

    alone = run_course(run(), prompts, tmp_path / "one")
    found = bench.course(run(sharding=SHARDINGS[name], n_gpus_per_node=4), prompts, tmp_path).result()
    same_training(alone, found, 1e-6)  # its other norms pass through float32


@pytest.mark.exhaustive
@names("fsdp", "tp", "tp_fsdp", short=("tp",))
def test_computing_in_bfloat16_means_the_same(name, bench, model32, tmp_path):
    def run(autocast="bfloat16", **parts):
        rollout = ScriptedRollout(max_new_tokens=7, texts=("12", "7*7=49", "0"))
        made = ppo_run(model32, PPO_ALGORITHM, rollout=rollout, group_size=1, lr=1e-4, **parts)
        critic = dataclasses.replace(made.critic, autocast=autocast)  # type: ignore
        return dataclasses.replace(with_actor(made, autocast=autocast), critic=critic)

    prompts = [[0, 1, 2, 3, 4]]
    wide, alone = (run_course(run(kind), prompts, tmp_path / str(kind)) for kind in (None, "bfloat16"))  # type: ignore
    found = bench.course(run(sharding=SHARDINGS[name], n_gpus_per_node=4), prompts, tmp_path).result()
    for key in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "rollout/entropy_nats"):
        assert found.metrics[1][key] == pytest.approx(alone.metrics[1][key], rel=0.05, abs=0.01), key
    entropies = [course.metrics[1]["rollout/entropy_nats"] for course in (found, wide)]
    assert abs(entropies[0] - entropies[1]) > 1e-5  # it was not computed in float32
    assert all(x.dtype == torch.float32 for x in found.weights.values())


@pytest.fixture(scope="module", params=["whole", *exhaustive("adapter")])
def saved(request, model64, tmp_path_factory):
    """A run of one process, and its checkpoint after two steps."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoint = Checkpointing(save_dir=str(directory / "checkpoints"), save_interval=2, save_async=False)
    run = dataclasses.replace(ppo_run(model64, PPO_ALGORITHM, total_steps=2, save_final=False), checkpoint=checkpoint)
    if request.param == "adapter":
        run = dataclasses.replace(with_actor(run, lora=LoRA()), critic=dataclasses.replace(run.critic, lora=LoRA()))  # type: ignore
    fit(run, directory / "run")
    return run, directory / "checkpoints/global_step_2"


@names("fsdp", "hsdp", "tp", "tp_fsdp", short=("tp_fsdp",))
def test_a_checkpoint_of_one_process_is_loaded_and_given_back_bit_by_bit(name, bench, saved):
    run, checkpoint = saved
    settings = dataclasses.replace(run.trainer, n_gpus_per_node=4)
    spread = dataclasses.replace(run, sharding=SHARDINGS[name], trainer=settings)
    states = bench.loaded(spread, checkpoint).result()
    reader = CheckpointReader(open_checkpoint(FileSystem(), checkpoint), FileSystem())
    for role, state in states.items():
        assert state.updates == 4
        assert_holds(reader, role, state.model.tensors)
        assert_holds(reader, "optimizer", {f"{role}.{name}": x for name, x in state.optimizer.items()}, f"{role}.")
        for file, data in state.model.files.items():
            assert bytes(reader.read(f"{role}/{file}")) == data, file


def assert_holds(reader, component, tensors, prefix=""):
    """A component of a checkpoint has these tensors, and no others whose names open with the prefix."""
    there = {tensor.name: tensor for tensor in reader.tensors(component) if tensor.name.startswith(prefix)}
    assert tensors.keys() == there.keys()
    for name, x in tensors.items():
        assert torch.equal(x, as_tensor(reader.tensor(component, name), there[name])), name
