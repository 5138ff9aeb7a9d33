"""Choices of routers: counted, recorded while sampling, and chosen again."""

import dataclasses

import pytest
import torch
from cases import short_where
from equivalence.one_update import one_update, rows_with_holes
from random_models import save_random_model
from refusals import refusal
from trainer.runs import GRPO_ALGORITHM, ppo_run

from verl.component import BuildContext
from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.engine import TrainingEngine
from verl.engines.parallel_dims import Parallelism
from verl.engines.sharding import TP, Parallel
from verl.engines.tensor_parallel import PROVEN
from verl.http_client.endpoint import Endpoint
from verl.model_paths.check import paths_for
from verl.model_paths.expert_routing import routing_of, weights_of_router
from verl.models.heads import LMHead
from verl.models.pretrained import Pretrained
from verl.models.structure import routers
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.scripted import ScriptedRollout
from verl.rollout.server.config import ServerRollout

ROWS = rows_with_holes([9, 3, 1], 4, [14, 3, 6, 1])


def made(path, family, dtype=torch.float64, **options):
    name = str(dtype).removeprefix("torch.")
    return Pretrained(path=str(save_random_model(path / family, family, dtype, **options)), dtype=name)


def scored(model, rows, micro_batch_tokens=100, packing="auto", **options):
    engine = TrainingEngine(model, Parallelism(), micro_batch_tokens, packing=packing)
    engine.replay_routing("actor.model")
    head = LMHead(model)

    def score(model, micro):
        return {"log_probs": token_log_probs(model, head, micro).log_probs}

    return engine.infer(rows, score, **options)["log_probs"]


@pytest.mark.parametrize("family", short_where(sorted(PROVEN), {"deepseek_v3", "qwen3_moe"}.__contains__))
def test_how_routers_of_every_family_weigh_experts_is_found(family, tmp_path):
    model = made(tmp_path, family, torch.float32).load_causal_lm("cpu")
    for router in routers(model):
        states = torch.randn(50, model.config.hidden_size)
        logits, weights, experts = router(states)
        torch.testing.assert_close(weights_of_router(router).of(logits, experts), weights)


def test_experts_that_were_chosen_are_chosen_again_however_rows_are_run(tmp_path):
    model = made(tmp_path, "qwen3_moe").load_causal_lm("cpu")
    paths_for(model, 64)
    routing = routing_of(model)
    draw = torch.Generator().manual_seed(1)
    shape = (*ROWS["responses"].shape, routing.layers, routing.experts)
    other = torch.rand(shape, generator=draw).argsort(dim=-1)[..., : routing.top_k].to(torch.int16)
    other[:, 1::3] = -1  # of some tokens nothing is known
    rows = ROWS.union(DataProto.from_dict({"routed_experts": other}))
    plain, replayed = scored(model, rows, replays=False), scored(model, rows)
    assert float((plain - scored(model, ROWS)).abs().max()) == 0.0
    assert float((plain - replayed).abs().max()) > 0.1
    prompt = ROWS["input_ids"].shape[1] - ROWS["responses"].shape[1]
    wanted = []
    for row in range(len(rows)):  # by itself, with routers that are told token by token
        told = torch.full((ROWS["input_ids"].shape[1], *other.shape[2:]), -1)
        told[prompt - 1 : -1] = other[row]
        routing.forced = told[ROWS["attention_mask"][row].bool()]
        x = {name: ROWS[name][row][ROWS["attention_mask"][row].bool()][None] for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            logits = model(**x).logits.double().log_softmax(dim=-1)[0, :-1]
        tokens = logits.gather(1, x["input_ids"][0, 1:, None])[:, 0]
        wanted.append(tokens[-int(ROWS["attention_mask"][row, prompt:].sum()) :])
    routing.end(torch.device("cpu"))
    first = torch.nn.utils.rnn.pad_sequence(wanted, batch_first=True) * ROWS["response_mask"]
    alone = [row for row in range(len(rows)) if row % 4 == 0]  # a shared prompt's last token has the choice of one row
    for found in (scored(model, rows, packing="off"), scored(model, rows[alone])):
        picked = found if len(found) == len(rows) else None
        expected = first if picked is not None else first[alone][:, : found.shape[1]]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_load_is_counted_over_what_predicted_response_tokens(tmp_path):
    model = made(tmp_path, "mixtral").load_causal_lm("cpu")
    paths_for(model, 64)
    routing, loads = routing_of(model), []
    for packing, tokens in (("auto", 1000), ("auto", 20), ("off", 50)):
        engine = TrainingEngine(model, Parallelism(), tokens, packing=packing)
        for micro in engine.micro_batches(ROWS):
            routing.begin(micro, counts=True)
            micro.predict(lambda logits_to_keep=0, **inputs: model(**inputs).logits)
        loads.append(routing.end(torch.device("cpu")).tensors())
    assert loads[0][-1] == routing.layers * int(ROWS["response_mask"].sum())
    assert loads[0][:-2].sum() == routing.top_k * loads[0][-1]
    for load in loads[1:]:
        torch.testing.assert_close(load, loads[0], rtol=0, atol=1e-4)


def test_a_step_replays_what_was_recorded_and_tells_both_gaps(tmp_path):
    model = made(tmp_path, "qwen3_moe")
    rollout = HFRollout(max_new_tokens=6, router_replay=True)
    run = ppo_run(model, dataclasses.replace(GRPO_ALGORITHM, mini_batches=1), group_size=3, rollout=rollout)
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        batch = trainer.train_data.collate([0, 1])
        rows = trainer.sampling.generate(batch, GenerationRequest(1, 3))
        routed, mask = rows["routed_experts"], rows["response_mask"]
        assert routed.shape == (*mask.shape, 2, 2)
        assert ((routed >= 0).flatten(2).all(dim=2) == mask).all()
        metrics = trainer.step(batch, 1)
    assert metrics["rollout/log_prob_gap_nats"] < 1e-6
    assert metrics["rollout/log_prob_gap_without_replay_nats"] < 1e-6
    assert 1 <= metrics["actor/expert_load_max_ratio"] <= 2


def test_router_replay_is_refused_where_it_was_not_tried(tmp_path, model64):
    model, rollout = made(tmp_path, "qwen3_moe"), HFRollout(max_new_tokens=6, router_replay=True)
    with refusal("rollout.router_replay"):
        ppo_run(model64, GRPO_ALGORITHM, group_size=3, rollout=rollout)
    for sharding in (TP(), Parallel(pp=2)):
        with refusal("rollout.router_replay"):
            ppo_run(model, GRPO_ALGORITHM, group_size=3, rollout=rollout, sharding=sharding, n_gpus_per_node=2)
    served = ServerRollout(endpoint=Endpoint(base_url="http://localhost:1"), max_new_tokens=6)
    with refusal("rollout"):
        ppo_run(model, GRPO_ALGORITHM, group_size=3, rollout=served, sharding=Parallel(ep=2), n_gpus_per_node=2)
    with refusal("router_replay"):
        ScriptedRollout(texts=("1",), router_replay=True)


def test_the_balance_loss_is_that_of_transformers_whatever_the_micro_batches(tmp_path):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    found = [
        one_update(made(tmp_path / name, "qwen3_moe"), Parallelism(), ROWS, tokens=tokens, router_aux_loss_coef=coef)
        for name, tokens, coef in (("a", 1000, 0.5), ("b", 15, 0.5), ("c", 1000, 0.0))
    ]
    model = made(tmp_path / "d", "qwen3_moe").load_causal_lm("cpu")
    names = ("input_ids", "attention_mask", "position_ids")
    with torch.no_grad():
        logits = model(**{name: ROWS[name] for name in names}, output_router_logits=True).router_logits
    predicts = torch.zeros_like(ROWS["attention_mask"])
    width = ROWS["responses"].shape[1]
    predicts[:, -width - 1 : -1] = ROWS["response_mask"]
    expected = load_balancing_loss_func(logits, 4, 2, predicts)
    assert float(found[0]["router_aux_loss"]) == pytest.approx(float(expected), abs=1e-6)
    gate = "gradient of model.layers.1.mlp.gate.weight"
    assert float((found[0][gate] - found[2][gate]).abs().max()) > 1e-3
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, rtol=0, atol=1e-6)
    assert float(found[0]["loss"] - found[2]["loss"]) == pytest.approx(0.5 * float(expected), abs=1e-6)


def test_a_balance_loss_that_a_model_does_not_define_is_refused(tmp_path):
    with refusal("actor.router_aux_loss_coef"):
        one_update(made(tmp_path, "deepseek_v3"), Parallelism(), ROWS, router_aux_loss_coef=0.1)
