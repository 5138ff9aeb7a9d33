"""`rollout=server` and new weights: given, proven, and refused where they did not arrive."""

import dataclasses
from pathlib import Path

import pytest
import torch
from cases import exhaustive
from http_client.servers import Say, serving
from refusals import refusal
from roles import experience
from rollout.speaking import gap
from trainer.runs import GRPO_ALGORITHM, JSONL, fit, ppo_run, read_lines
from transformers import LlamaConfig, LlamaForCausalLM

from verl.engines.sharding import DDP, FSDP, TP, Parallel
from verl.errors import RolloutError
from verl.http_client.request import Request
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.rollout.base import GenerationRequest
from verl.rollout.server.config import ServerRollout
from verl.rollout.server.protocols import OpenAIProtocol
from verl.rollout.server.weight_update import ServerWeightUpdate
from verl.rollout.weight_sync.transfer import TransferToFirst


def train(actor, prompts):
    actor.update(experience(actor, prompts()))


@pytest.mark.slow
@pytest.mark.parametrize("actor", [{}, {"lora": LoRA(rank=2)}], ids=["whole", "adapter"])
def test_the_server_follows_the_trained_weights_and_proves_it(actor, attached, speaker, prompts, tmp_path):
    actor = attached(speaker, transfer_dir=str(tmp_path / "seen by both"), actor=actor)
    before = actor.generate(prompts(), GenerationRequest(0, 2))
    assert len(speaker.reloads) == 1
    train(actor, prompts)
    assert gap(actor, before) > 1e-4
    synced = actor.sync()
    assert synced.metrics["sync/probe_gap_nats"] < 1e-5
    assert synced.metrics["sync/bytes"] > 1e4
    assert "MiB to the server" in synced.note
    assert gap(actor, actor.generate(prompts(), GenerationRequest(1, 2))) < 1e-5
    assert len(speaker.reloads) == len(set(speaker.reloads)) == 2
    assert [path for path in (tmp_path / "seen by both").rglob("*") if path.is_file()] == []
    actor.close()
    assert list((tmp_path / "seen by both").iterdir()) == []


def test_tensors_that_a_model_keeps_in_float32_are_sent_so():
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.model.norm.float()
    types = {name: x.dtype for name, x in TransferToFirst(model, None).tensors()}
    assert {name for name, dtype in types.items() if dtype == torch.float32} == {"model.norm.weight"}
    assert {x.dtype for _, x in TransferToFirst(model, "bfloat16").tensors()} == {torch.bfloat16}


class Load(Request):
    """Read weights, and forget keys and values, in one request."""

    path = "/load"

    def __init__(self, directory):
        self.directory = directory

    def body(self):
        return {"directory": self.directory}


class OwnUpdate(ServerWeightUpdate):
    needs = "/load"

    def trial(self):
        return Load(None)

    def requests(self, directory):
        return [Load(str(directory))]


def test_the_verbs_of_another_server_are_one_class(attached, speaker, prompts, monkeypatch):
    monkeypatch.setattr(OpenAIProtocol, "weight_update", OwnUpdate)

    def post(asked):
        if asked.path == "/v1/completions":
            return speaker.post(asked)
        if (directory := asked.body["directory"]) is None:
            return {}
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        return speaker.post(dataclasses.replace(asked, path="/collective_rpc", body=body))

    actor = attached(speaker, post)
    train(actor, prompts)
    actor.sync()
    assert gap(actor, actor.generate(prompts(), GenerationRequest(1))) < 1e-5
    assert {asked.path for asked in actor.server.asked} == {"/load", "/v1/completions"}


def test_weights_go_in_several_files_where_they_are_large(attached, speaker, prompts, monkeypatch):
    monkeypatch.setattr("verl.rollout.server.weight_update.FILE_BYTES", 10_000)
    counted = []

    def post(asked):
        if asked.path == "/collective_rpc" and "kwargs" in asked.body:
            counted.append(len(list(Path(asked.body["kwargs"]["weights_path"]).glob("*.safetensors"))))
        return speaker.post(asked)

    actor = attached(speaker, post)
    train(actor, prompts)
    actor.sync()
    assert counted[-1] > 2
    assert gap(actor, actor.generate(prompts(), GenerationRequest(1))) < 1e-5


def test_a_reload_that_does_nothing_is_found_out(attached, speaker, prompts):
    actor = attached(speaker, max_gap_nats=10.0)  # wide open: what gives it away is that the old weights fit better
    train(actor, prompts)
    speaker.takes_weights = False
    with pytest.raises(RolloutError, match="It holds the weights of the step before: its reload did nothing"):
        actor.sync()


@pytest.mark.parametrize("name", ["lm_head.weight", *exhaustive("model.layers.1.self_attn.k_proj.bias")])
def test_a_tensor_that_the_server_does_not_load_is_found_out(name, attached, speaker, prompts):
    actor = attached(speaker)
    actor.generate(prompts(), GenerationRequest(0))
    with torch.no_grad():
        actor.model.get_parameter(name).add_(0.5 * torch.randn_like(actor.model.get_parameter(name)))
    speaker.drops = (name,)
    with pytest.raises(RolloutError, match=r"log-probs of fixed text differ by .* nats on average, where 0\.001 may"):
        actor.sync()


def test_a_cache_of_old_weights_that_stays_is_refused(attached, speaker, prompts):
    speaker.cache_resets = False
    with pytest.raises(RolloutError, match=r"did not take new weights: /reset_prefix_cache answers"):
        attached(speaker).generate(prompts(), GenerationRequest(0))


def test_a_reload_that_fails_is_told_with_the_directory(attached, speaker, prompts):
    def post(asked):
        is_reload = asked.path == "/collective_rpc" and "method" in asked.body
        return Say(status=500, body="size mismatch") if is_reload else speaker.post(asked)

    with pytest.raises(RolloutError, match=r"HTTP 500: .size mismatch.* Does it see .*verl_weights_"):
        attached(speaker, post).generate(prompts(), GenerationRequest(0))


def test_a_directory_that_cannot_be_written_is_a_fault_of_the_configuration(attached, speaker, tmp_path):
    (tmp_path / "file").write_text("")
    with refusal("rollout.transfer_dir"):
        attached(speaker, transfer_dir=str(tmp_path / "file" / "below"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "sharding"),
    [
        (1, None),
        *(
            pytest.param(count, sharding, marks=pytest.mark.exhaustive)
            for count, sharding in (
                (2, Parallel(pp=2, timeout_s=60.0)),
                (2, DDP(timeout_s=60.0)),
                (2, FSDP(timeout_s=60.0)),
                (2, TP(timeout_s=60.0)),
                (2, Parallel(cp=2, timeout_s=60.0)),
                (4, Parallel(pp=2, tp=2, timeout_s=60.0)),
                (4, Parallel(pp=2, dp_replicate=2, timeout_s=60.0)),
                (4, Parallel(pp=2, timeout_s=60.0)),
            )
        ),
    ],
    ids=["one", "pp", "ddp", "fsdp", "tp", "cp", "tp pp", "pp dp", "pp fsdp"],
)
@pytest.mark.xdist_group("two processes")
def test_a_run_trains_on_what_the_server_draws(num_processes, sharding, speaker, dir32, tmp_path):
    spread = {} if sharding is None else {"sharding": sharding, "n_gpus_per_node": num_processes}
    with serving(speaker.post, speaker.page) as server:
        run = ppo_run(
            Pretrained(path=str(dir32)),
            GRPO_ALGORITHM,
            rollout=ServerRollout(endpoint=server.endpoint(), max_new_tokens=7),
            total_steps=2,
            tracker=JSONL,
            **spread,
        )
        fit(run, tmp_path)
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "reward/mean" in line]
    assert len(lines) == 2
    assert all(line["sync/probe_gap_nats"] < 1e-4 for line in lines)
    assert all(line["rollout/log_prob_gap_nats"] < 1e-4 for line in lines)
    assert len(speaker.reloads) == 3  # before the first response, and after each step; by one process
