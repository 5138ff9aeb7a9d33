"""Settings that no component of a kind can have, and parts that no run can have together, with what refuses each."""

from functools import partial
from math import inf, nan

import pytest
from refusals import refusal

from verl.algorithms.advantages import GAE, GRPO
from verl.algorithms.critic_free_advantages import ReinforcePlusPlus, ReMax
from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.algorithms.importance_sampling import TruncatedIS
from verl.algorithms.kl import KLInLoss, KLInReward
from verl.algorithms.losses import CISPO, GSPO, ClippedValueLoss, PPOClip
from verl.algorithms.preference_losses import DPO
from verl.checkpoint.retention import Retention
from verl.cluster.placement import DeviceMesh
from verl.cluster.ray.ray_placement import RayPlacement
from verl.compose.compose import compose_root
from verl.compose.schema import ROOTS
from verl.compose.validate import validate
from verl.engines.optimizer import AdamW
from verl.engines.sharding import DDP, FSDP, HSDP, TP, TPFSDP, Parallel
from verl.environments.python_sandbox import PythonSandbox
from verl.http_client.endpoint import Endpoint
from verl.models.lora import LoRA
from verl.models.tiny import TinyModel
from verl.monitoring.config import Monitoring
from verl.rewards.code_tests import CodeTests
from verl.rewards.remote.http_reward import HTTPReward
from verl.rewards.remote.llm_judge import LLMJudge
from verl.rewards.rules import ExactMatch, Format, Length, MathAnswer, Overlong
from verl.rewards.weighted_sum import WeightedSum
from verl.rollout.hf import HFRollout
from verl.rollout.scripted import ScriptedRollout
from verl.rollout.server.config import ServerRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.sandbox.jail import Jail
from verl.storage.config import S3Storage
from verl.tracking.base import Trackers
from verl.tracking.console import Console
from verl.tracking.tensorboard import TensorBoard
from verl.tracking.wandb import WandB

HERE = Endpoint(base_url="http://localhost:1")
TWO = ["cpu:0", "cpu:1"]
PARTS = {"correct": ExactMatch(), "overlong": Overlong(max_tokens=4, buffer_tokens=2)}
JUDGE = partial(LLMJudge, endpoint=HERE, model="judge", template="{response}", score_pattern=r"(\d+)")
HTTP, SERVER = partial(HTTPReward, endpoint=HERE), partial(ServerRollout, endpoint=HERE)
STORE = partial(S3Storage, bucket="models")
REMOTE = partial(Endpoint, base_url="http://localhost:1/v1")

REFUSED = [  # kind, settings, and what is blamed if not the last of them
    # algorithms
    (GAE, {"gamma": 1.5}), (GAE, {"lam": -0.1}), (GAE, {"lam": nan}),
    (GRPO, {"epsilon": 0.0}),
    (ReinforcePlusPlus, {"gamma": 1.5}),
    (ReMax, {"gamma": 1.5}),
    *((kind, {"clip_low": 1.2}) for kind in (PPOClip, GSPO, CISPO)),
    *((kind, {"clip_high": -0.1}) for kind in (PPOClip, GSPO, CISPO)),
    (PPOClip, {"dual_clip": 1.0}),
    *((ClippedValueLoss, {"clip": clip}) for clip in (0.0, -1.0, inf)),
    *((kind, {"coef": -0.1}) for kind in (KLInReward, KLInLoss)),
    *((kind, {"coef": 0.1, "estimator": "k4"}) for kind in (KLInReward, KLInLoss)),
    (TruncatedIS, {"cap": 0.5}), (TruncatedIS, {"mode": "mask", "floor": 1.5}), (TruncatedIS, {"floor": 0.5}),
    (TruncatedIS, {"level": "word"}),
    (DynamicSampling, {"max_rounds": 0}),
    (DPO, {"label_smoothing": 0.5}),
    # engines, and where roles run
    (AdamW, {"lr": -1.0}), (AdamW, {"lr": 1.0, "betas": [0.9]}),
    (AdamW, {"lr": 1.0, "betas": [0.9, 1.0]}, "betas[1]"), (AdamW, {"lr": 1.0, "max_grad_norm": 0.0}),
    (AdamW, {"lr": 1.0, "warmup_updates": -1}), (AdamW, {"lr": 1.0, "final_fraction": 1.5}),
    (AdamW, {"lr": 1.0, "schedule": "wsd"}),
    (DDP, {"timeout_s": 0}),
    (HSDP, {"replicas": 0}),
    (TP, {"tensor_parallel": 0}),
    (TPFSDP, {"tensor_parallel": 0}),
    (FSDP, {"strategy": "HALF_SHARD"}),
    (Parallel, {"dp_shard": 0}), (Parallel, {"cp": 0}), (Parallel, {"cp_style": "ring"}),
    (Parallel, {"pp": 2, "cpu_offload": True}), (Parallel, {"ep": 2, "tp": 2}, "ep"),
    (DeviceMesh, {"devices": []}), (DeviceMesh, {"devices": ["gpu:0"]}), (DeviceMesh, {"devices": ["cpu"]}),
    (DeviceMesh, {"devices": ["cpu:0", "cpu:0"]}), (DeviceMesh, {"devices": TWO, "sub_meshes": {"judge": TWO}}),
    (DeviceMesh, {"devices": TWO, "sub_meshes": {"rm": ["gpu:2"]}}, "sub_meshes.rm"),
    (DeviceMesh, {"devices": TWO, "sub_meshes": {"rm": []}}, "sub_meshes.rm"),
    (DeviceMesh, {"devices": ["cpu:0", "cuda:0"], "sub_meshes": {"rm": ["cpu:0", "cuda:0"]}}, "sub_meshes.rm"),
    (RayPlacement, {"num_gpus": 1.5}),
    # models
    (LoRA, {"rank": 0}), (LoRA, {"target_modules": []}),
    (TinyModel, {"hidden_size": 0}), (TinyModel, {"num_heads": 3}), (TinyModel, {"dtype": "int8"}),
    # rollout engines
    (HFRollout, {"temperature": 0.0}), (HFRollout, {"top_k": -1}), (HFRollout, {"top_p": 0.0}),
    (HFRollout, {"top_p": 1.1}), (HFRollout, {"max_new_tokens": 0}),
    (HFRollout, {"max_new_tokens": 4, "min_new_tokens": 5}), (HFRollout, {"max_rows": 0}),
    (HFRollout, {"share_prefix": "yes"}),
    (ScriptedRollout, {"texts": ()}),
    (VLLMRollout, {"kv_cache_gib": 0.0}), (VLLMRollout, {"max_num_seqs": 0}),
    (VLLMRollout, {"max_num_seqs": 64, "max_num_batched_tokens": 32}),
    (VLLMRollout, {"max_model_len": 128, "max_new_tokens": 128}, "max_model_len"),
    (VLLMRollout, {"max_model_len": 0}), (VLLMRollout, {"num_threads": 0}), (VLLMRollout, {"lora": "merge"}),
    (VLLMRollout, {"temperature": 0.0}), (VLLMRollout, {"tensor_parallel_size": 0}),
    (VLLMRollout, {"pipeline_parallel_size": 0}),
    (VLLMRollout, {"pipeline_parallel_size": 2, "weight_update": "in_flight"}, "kv_cache"),
    (VLLMRollout, {"call_timeout_s": 0.0}), (VLLMRollout, {"start_timeout_s": 0.0}),
    (SERVER, {"endpoint": Endpoint(base_url="http://h/v1")}, "endpoint.base_url"),
    (SERVER, {"weights": "fixed", "log_probs": "trainer"}), (SERVER, {"weights": "fixed", "transfer_dir": "/x"}),
    (SERVER, {"max_gap_nats": 0.0}), (SERVER, {"protocol": "tgi"}, "weights"),
    (SERVER, {"protocol": "tgi", "weights": "fixed", "min_new_tokens": 1}),
    # rewards
    (ExactMatch, {"correct": 0.0}),
    (Format, {"pattern": "(a"}), (Format, {"pattern": "a", "correct": 0}),
    (Length, {"min_tokens": -1}), (Length, {"min_tokens": 3, "max_tokens": 2}), (Length, {"inside": nan}),
    (Overlong, {"max_tokens": 0, "buffer_tokens": 0}, "max_tokens"),
    (Overlong, {"max_tokens": 4, "buffer_tokens": 5}),
    (Overlong, {"max_tokens": 4, "buffer_tokens": 1, "penalty": -1.0}),
    (MathAnswer, {"correct": 0}), (MathAnswer, {"timeout_s": -1}),
    (WeightedSum, {"parts": {}, "weights": {}}, "parts"),
    (WeightedSum, {"parts": PARTS, "weights": {"correct": 1.0}}),
    (WeightedSum, {"parts": PARTS, "weights": dict.fromkeys([*PARTS, "long"], 1.0)}, "weights.long"),
    (WeightedSum, {"parts": PARTS, "weights": {"correct": 1.0, "overlong": inf}}, "weights.overlong"),
    (WeightedSum, {"parts": {"mean": ExactMatch()}, "weights": {"mean": 1.0}}, "parts.mean"),
    (WeightedSum, {"parts": {"a b": ExactMatch()}, "weights": {"a b": 1.0}}, "parts.a"),
    (JUDGE, {"model": ""}), (JUDGE, {"template": "{prompt} {{response}}"}),
    (JUDGE, {"options": {"messages": []}}, "options.messages"), (JUDGE, {"score_pattern": None}),
    (JUDGE, {"score_path": "a"}, "score_pattern"), (JUDGE, {"score_pattern": "("}),
    (JUDGE, {"score_pattern": None, "score_function": "absent.py:f"}),
    (JUDGE, {"min_score": 1.0, "max_score": 1.0}, "min_score"),
    (HTTP, {"fields": {"prompt": "prompt"}}), (HTTP, {"options": {"a": 1}}),
    (HTTP, {"options": {"a": 1}, "items_key": "a"}, "options.a"), (HTTP, {"batch_size": 0}),
    (HTTP, {"error_score": nan}), (HTTP, {"on_error": "zero"}),
    # checkpoints, monitoring, trackers, sandboxes
    *((Retention, {name: 0}) for name in ("keep_last_n", "keep_every")),
    (Retention, {"best_mode": "most"}),
    (Monitoring, {"max_skips": 0}),
    (Monitoring, {"max_dumps": -1}),
    (Monitoring, {"plant_nan_at": 0}), (Monitoring, {"on_non_finite": "ignore"}),
    (Console, {"sample_rows": -1}),
    (TensorBoard, {"flush_s": 0}),
    (WandB, {"mode": "shared"}), (WandB, {"project": ""}),
    *((kind, {"sandbox": None}) for kind in (PythonSandbox, CodeTests)),
    (PythonSandbox, {"sandbox": Jail(), "step_timeout_s": 5.0}),
    (CodeTests, {"sandbox": Jail(), "timeout_s": 60.0}),
    # services and stores
    *((Endpoint, {"base_url": url}) for url in ("localhost:8000", "ftp://host/", "http://", "http://host:99999")),
    *((REMOTE, {name: 0}) for name in ("max_concurrency", "timeout_s")), (REMOTE, {"retries": -1}),
    (REMOTE, {"total_timeout_s": nan}), (REMOTE, {"requests_per_minute": -5.0}), (REMOTE, {"max_answer_mib": inf}),
    (REMOTE, {"backoff_s": 61.0}), (REMOTE, {"key_header": "X Key"}), (REMOTE, {"headers": {"X": "a\nb"}}, "headers.X"),
    *((STORE, {"bucket": name}) for name in (None, "models/runs")),
    *((STORE, {"endpoint_url": url}) for url in ("host:9", "http://me:pass@host:9000")),
    *((STORE, {"prefix": name}) for name in ("a//b", "a/../b", "a#b")), (STORE, {"part_mib": 1}),
    (STORE, {"retries": -1}), (STORE, {"timeout_s": 0.0}),
    (Trackers, {"jsonl": "yes"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "path"),
    [(*row, None)[:3] for row in REFUSED],
    ids=lambda given: getattr(given, "__name__", str(given)[:90]),
)
def test_settings_that_cannot_be_are_refused_by_name(kind, settings, path):
    with refusal(path or [*settings][-1]):
        kind(**settings)


SCRATCH = ["actor=tiny_scratch"]
TWO_PROCESSES = ["trainer.n_gpus_per_node=2"]
CONTEXT, TENSORS = ([*TWO_PROCESSES, "sharding=parallel", f"sharding.{axis}=2"] for axis in ("cp", "tp"))
ADAPTER = ["rollout=vllm", "rollout.lora=adapter"]
LORA = "actor.lora.rank={}"
AHEAD = ["trainer.mode=async"]
CORRECTED = [*AHEAD, "algorithm.correction.level=token"]
SERVED = ["rollout=server", "rollout.endpoint.base_url=http://localhost:8000"]
BEHAVIOUR = ["algorithm.proximal=behaviour", *SERVED]
IN_FLIGHT = ["rollout.weight_update=in_flight"]
ASYNC_2 = ["trainer.mode=async", "trainer.max_staleness=2"]
TOOLS = ["environment=calculator", "data=calculator", "critic=none", "algorithm=grpo"]
TOOLS += ["actor=tiny_scratch", "actor.model.context_length=160"]
PROGRAM = ["environment=agent_program", "environment.path=agent.py:run"]
REFUSED_RUNS = [  # overrides, and what is blamed
    # an engine and the actor
    ([*ADAPTER, LORA.format(600)], "actor.lora.rank"),
    (["rollout=vllm", "rollout.call_timeout_s=600", "sharding=fsdp", *TWO_PROCESSES], "rollout.call_timeout_s"),
    # drawing one step ahead
    (AHEAD, "trainer.mode"),
    ([*CORRECTED, "algorithm.proximal=behaviour"], "algorithm.correction"),
    ([*BEHAVIOUR, "rollout.log_probs=trainer"], "algorithm.proximal"),
    ([*CORRECTED, "rollout=auto"], "trainer.mode"),
    ([*CORRECTED, "rollout=vllm", *ASYNC_2], "trainer.max_staleness"),
    ([*CORRECTED, "trainer=ray", "+trainer.placement.pools={a:[rollout,critic]}"], "trainer.placement.pools"),
    ([*CORRECTED, "trainer=ray", "trainer.placement.in_driver=[rollout]"], "trainer.placement.in_driver"),
    (
        [
            *CORRECTED,
            "trainer=ray",
            "+trainer.placement.pools={s:[rollout]}",
            "+trainer.placement.workers={s:3}",
            "trainer.prompts_per_step=2",
        ],
        "trainer.placement",
    ),
    ([*CORRECTED, *SERVED, *ASYNC_2], "trainer.max_staleness"),
    ([*CORRECTED, "rollout.router_replay=true"], "trainer.mode"),
    ([*CORRECTED, "rollout.weight_update=never"], "rollout.weight_update"),
    ([*CORRECTED, *SERVED, *IN_FLIGHT], "rollout.weight_update"),
    ([*CORRECTED, *TOOLS, *PROGRAM, *IN_FLIGHT], "rollout.weight_update", "data.max_prompt_length"),
    ([*CORRECTED, "trainer.replay_schedule=run"], "trainer.replay_schedule"),
    (["trainer.replay_schedule=run"], "trainer.replay_schedule"),
    ([*CORRECTED, "algorithm=dapo"], "trainer.mode"),
    ([*CORRECTED, "algorithm=remax"], "trainer.mode"),
    ([*CORRECTED, "trainer.repeat_first_batch=true"], "trainer.mode"),
    # what only a built role would find
    ([*CONTEXT, "actor.packing=off"], "actor.packing"),
    (["actor=tiny_scratch", "actor.router_aux_loss_coef=0.01"], "actor.router_aux_loss_coef"),
    ([*TENSORS, "actor.router_aux_loss_coef=0.01"], "actor.router_aux_loss_coef"),
    ([*TENSORS, "actor.model.compile=true"], "actor.model.compile", "critic.model.compile"),
    ([*CONTEXT, "algorithm=ppo", "critic.packing=off"], "critic.packing"),
    # episodes
    ([*TOOLS, "rollout=scripted"], "environment"),
    ([*TOOLS, "replay=tiered"], "environment"),
    ([*TOOLS, "algorithm=remax"], "environment"),
    ([*TOOLS, "algorithm=dapo"], "environment"),
    ([*TOOLS, "rollout.min_new_tokens=2"], "environment"),
    ([*TOOLS, "environment=guess_number"], "environment"),
    ([*TOOLS, "environment=none", "reward=environment"], "reward"),
    ([*TOOLS, "environment=none", "trainer.eval_without_tools=true"], "trainer.eval_without_tools"),
    ([*TOOLS, "environment.max_tokens=500"], "data.max_prompt_length"),
    # other trainings
    (["dpo", *SCRATCH, "reference=none"], "reference"),
    (["dpo", *SCRATCH, "loss=bradley_terry"], "loss"),
    (["reward_model", *SCRATCH, "loss=simpo"], "loss"),
    (["dpo", *SCRATCH, "loss=kto", "reference=precomputed"], "reference"),
    (["dpo", *SCRATCH, "loss=kto", "trainer.batch_size=1"], "trainer.batch_size"),
    (["reward_model", *SCRATCH, LORA.format(0)], "actor.lora.rank"),
    *((["dpo", *SCRATCH, f"data.max_length={length}"], "data.max_length") for length in (65, 9)),
    (["dpo", *SCRATCH, "loss.beta=0"], "loss.beta"),
]


@pytest.mark.first_rows(12)
@pytest.mark.parametrize(
    ("overrides", "paths"),
    [(row[0], row[1:]) for row in REFUSED_RUNS],
    ids=lambda given: getattr(given, "__name__", str(given)[:90]),
)
def test_what_does_not_go_together_is_refused_by_name(overrides, paths):
    root, *overrides = overrides if overrides[0] in ROOTS else ["ppo", *overrides]
    values = [f"++{word.lstrip('+')}" for word in overrides if "." in word.partition("=")[0]]
    options = [word for word in overrides if "." not in word.partition("=")[0]]
    with refusal(*paths):
        validate(compose_root(root, [*options, *values]))  # values behind options are set in what is composed once
