"""Settings that no component of a kind can have, and parts that no run can have together, with what refuses each."""

from __future__ import annotations

from functools import partial
from math import inf, nan

import pytest

from verl.algorithms.advantages import GAE, GRPO
from verl.algorithms.critic_free_advantages import ReinforcePlusPlus, ReMax
from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.algorithms.importance_sampling import TruncatedIS
from verl.algorithms.kl import KLInLoss, KLInReward
from verl.algorithms.losses import CISPO, GSPO, ClippedValueLoss, PPOClip
from verl.checkpoint.retention import Retention
from verl.cluster.placement import DeviceMesh
from verl.cluster.ray.ray_placement import RayPlacement
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.engines.optimizer import AdamW
from verl.engines.sharding import DDP, FSDP, HSDP, TP, TPFSDP, Parallel
from verl.errors import ConfigError
from verl.http_client.endpoint import Endpoint
from verl.models.lora import LoRA
from verl.models.tiny import TinyModel
from verl.monitoring.config import Monitoring
from verl.rewards.remote.http_reward import HTTPReward
from verl.rewards.remote.llm_judge import LLMJudge
from verl.rewards.rules import ExactMatch, Format, Length, MathAnswer, Overlong
from verl.rewards.weighted_sum import WeightedSum
from verl.rollout.hf import HFRollout
from verl.rollout.scripted import ScriptedRollout
from verl.rollout.server.config import ServerRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.sandbox.remote import RemoteSandbox
from verl.tracking.base import Trackers
from verl.tracking.console import Console
from verl.tracking.tensorboard import TensorBoard

HERE = Endpoint(base_url="http://localhost:1")
TWO = ["cpu:0", "cpu:1"]
PARTS = {"correct": ExactMatch(), "overlong": Overlong(max_tokens=4, buffer_tokens=2)}
JUDGE = partial(LLMJudge, endpoint=HERE, model="judge", template="{response}", score_pattern=r"(\d+)")
HTTP, SERVER = partial(HTTPReward, endpoint=HERE), partial(ServerRollout, endpoint=HERE)

REFUSED = [  # kind, settings, and a part of the message
    # algorithms
    (GAE, {"gamma": 1.5}, "gamma is 1.5: must lie in"),
    (GAE, {"lam": -0.1}, "lam is -0.1: must lie in"),
    (GAE, {"lam": nan}, "lam is nan"),
    (GRPO, {"epsilon": 0.0}, "epsilon is 0.0: must be above 0"),
    (ReinforcePlusPlus, {"gamma": 1.5}, "gamma is 1.5: must lie in"),
    (ReMax, {"gamma": 1.5}, "gamma is 1.5: must lie in"),
    *((kind, {"clip_low": 1.2}, "clip_low is 1.2: must lie in") for kind in (PPOClip, GSPO, CISPO)),
    *((kind, {"clip_high": -0.1}, "clip_high is -0.1: must not be negative") for kind in (PPOClip, GSPO, CISPO)),
    (PPOClip, {"dual_clip": 1.0}, "dual_clip is 1.0: must be above 1, or null"),
    *((ClippedValueLoss, {"clip": clip}, f"clip is {clip}: must be") for clip in (0.0, -1.0, inf)),
    *((kind, {"coef": -0.1}, "coef is -0.1") for kind in (KLInReward, KLInLoss)),
    *((kind, {"coef": 0.1, "estimator": "k4"}, "estimator is 'k4'") for kind in (KLInReward, KLInLoss)),
    (TruncatedIS, {"cap": 0.5}, "cap is 0.5: must be"),
    (TruncatedIS, {"mode": "mask", "floor": 1.5}, "floor is 1.5: must lie"),
    (TruncatedIS, {"floor": 0.5}, "floor is 0.5: mode=truncate has no floor"),
    (TruncatedIS, {"level": "word"}, "level is 'word': expected one of"),
    (DynamicSampling, {"max_rounds": 0}, "max_rounds is 0"),
    # engines, and where roles run
    (AdamW, {"lr": -1.0}, "lr is -1.0: must not be negative"),
    (AdamW, {"lr": 1.0, "betas": [0.9]}, "betas is"),
    (AdamW, {"lr": 1.0, "betas": [0.9, 1.0]}, "betas[1] is 1.0"),
    (AdamW, {"lr": 1.0, "max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
    (AdamW, {"lr": 1.0, "warmup_updates": -1}, "warmup_updates is -1"),
    (AdamW, {"lr": 1.0, "final_fraction": 1.5}, "final_fraction is 1.5"),
    (AdamW, {"lr": 1.0, "schedule": "wsd"}, "schedule is 'wsd': expected one of constant, linear, cosine"),
    (DDP, {"timeout_s": 0}, "timeout_s is 0"),
    (HSDP, {"replicas": 0}, "replicas is 0: must be at least 1"),
    (TP, {"tensor_parallel": 0}, "tensor_parallel is 0: must be at least 1, or null"),
    (TPFSDP, {"tensor_parallel": 0}, "tensor_parallel is 0: must be at least 1"),
    (FSDP, {"strategy": "HALF_SHARD"}, "strategy is 'HALF_SHARD': expected one of FULL_SHARD, SHARD_GRAD_OP"),
    (Parallel, {"dp_shard": 0}, "dp_shard is 0: must be at least 1, or -1"),
    (Parallel, {"cp": 0}, "cp is 0"),
    (Parallel, {"cp_style": "ring"}, "cp_style is 'ring': expected one of allgather, ulysses"),
    (Parallel, {"pp": 2, "cpu_offload": True}, "cpu_offload is true: cannot be combined with pp=2"),
    (Parallel, {"ep": 2, "tp": 2}, "ep is 2: cannot be combined with tensor parallelism"),
    (DeviceMesh, {"devices": []}, "devices is empty"),
    (DeviceMesh, {"devices": ["gpu:0"]}, "devices has 'gpu:0': expected cuda:N or cpu:N"),
    (DeviceMesh, {"devices": ["cpu"]}, "devices has 'cpu'"),
    (DeviceMesh, {"devices": ["cpu:0", "cpu:0"]}, "devices has cpu:0 twice"),
    (DeviceMesh, {"devices": TWO, "sub_meshes": {"judge": TWO}}, "sub_meshes has 'judge': there are the roles actor"),
    (DeviceMesh, {"devices": TWO, "sub_meshes": {"rm": ["gpu:2"]}}, "sub_meshes.rm has 'gpu:2': expected cuda:N"),
    (DeviceMesh, {"devices": TWO, "sub_meshes": {"rm": []}}, "sub_meshes.rm is empty"),
    (DeviceMesh, {"devices": ["cpu:0", "cuda:0"], "sub_meshes": {"rm": ["cpu:0", "cuda:0"]}}, "are of one kind"),
    (RayPlacement, {"num_gpus": 1.5}, "num_gpus is 1.5"),
    # models
    (LoRA, {"rank": 0}, "rank is 0"),
    (LoRA, {"target_modules": []}, "target_modules is empty"),
    (TinyModel, {"hidden_size": 0}, "hidden_size is 0: must be at least 1"),
    (TinyModel, {"num_heads": 3}, "num_heads is 3: must divide hidden_size 128"),
    (TinyModel, {"dtype": "int8"}, "dtype is 'int8': expected one of"),
    # rollout engines
    (HFRollout, {"temperature": 0.0}, "temperature is 0.0: must be above 0"),
    (HFRollout, {"top_k": -1}, "top_k is -1"),
    (HFRollout, {"top_p": 0.0}, "top_p is 0.0"),
    (HFRollout, {"top_p": 1.1}, "top_p is 1.1"),
    (HFRollout, {"max_new_tokens": 0}, "max_new_tokens is 0"),
    (HFRollout, {"max_new_tokens": 4, "min_new_tokens": 5}, "is 5: must lie between 0 and max_new_tokens 4"),
    (HFRollout, {"max_rows": 0}, "max_rows is 0"),
    (HFRollout, {"share_prefix": "yes"}, "share_prefix is 'yes': expected true or false"),
    (ScriptedRollout, {"texts": ()}, "texts is"),
    (VLLMRollout, {"kv_cache_gib": 0.0}, "kv_cache_gib is 0.0: must be above 0"),
    (VLLMRollout, {"max_num_seqs": 0}, "max_num_seqs is 0: must be at least 1"),
    (VLLMRollout, {"max_num_seqs": 64, "max_num_batched_tokens": 32}, "a pass takes at least one token of each of"),
    (VLLMRollout, {"max_model_len": 128, "max_new_tokens": 128}, "is 128: it holds prompt and response"),
    (VLLMRollout, {"max_model_len": 0}, "max_model_len is 0: must be at least 1, or null"),
    (VLLMRollout, {"num_threads": 0}, "num_threads is 0"),
    (VLLMRollout, {"lora": "merge"}, "lora is 'merge'"),
    (VLLMRollout, {"temperature": 0.0}, "temperature is 0.0: must be above 0"),
    (VLLMRollout, {"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
    (VLLMRollout, {"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0"),
    (
        VLLMRollout,
        {"pipeline_parallel_size": 2, "weight_update": "in_flight"},
        "kv_cache is keep: with pipeline_parallel_size 2 several steps are under way",
    ),
    (VLLMRollout, {"call_timeout_s": 0.0}, "call_timeout_s is 0.0: must be above 0"),
    (VLLMRollout, {"start_timeout_s": 0.0}, "start_timeout_s is 0.0: must be above 0, or null"),
    (SERVER, {"endpoint": Endpoint(base_url="http://h/v1")}, "endpoint.base_url ends with /v1"),
    (SERVER, {"weights": "fixed", "log_probs": "trainer"}, "log_probs is trainer, and weights is fixed"),
    (SERVER, {"weights": "fixed", "transfer_dir": "/x"}, "nothing is transferred where weights is fixed"),
    (SERVER, {"max_gap_nats": 0.0}, "max_gap_nats is 0.0"),
    (SERVER, {"protocol": "tgi"}, "weights is reload: TGI has no way to take new weights"),
    (SERVER, {"protocol": "tgi", "weights": "fixed", "min_new_tokens": 1}, "is 1: TGI knows nothing like"),
    # rewards
    (ExactMatch, {"correct": 0.0}, "correct is 0.0"),
    (Format, {"pattern": "(a"}, "pattern is '(a': not a regular expression"),
    (Format, {"pattern": "a", "correct": 0}, "correct is 0.0: must exceed wrong"),
    (Length, {"min_tokens": -1}, "min_tokens is -1"),
    (Length, {"min_tokens": 3, "max_tokens": 2}, "max_tokens is 2: must be at least min_tokens"),
    (Length, {"inside": nan}, "inside is nan"),
    (Overlong, {"max_tokens": 0, "buffer_tokens": 0}, "max_tokens is 0"),
    (Overlong, {"max_tokens": 4, "buffer_tokens": 5}, "buffer_tokens is 5: must lie in [0, max_tokens]"),
    (Overlong, {"max_tokens": 4, "buffer_tokens": 1, "penalty": -1.0}, "penalty is -1.0"),
    (MathAnswer, {"correct": 0}, "correct is 0.0: must exceed wrong"),
    (MathAnswer, {"timeout_s": -1}, "timeout_s is -1: must be above 0 and below 1e+06"),
    (WeightedSum, {"parts": {}, "weights": {}}, "parts is {}: expected at least one reward"),
    (WeightedSum, {"parts": PARTS, "weights": {"correct": 1.0}}, "weights has no overlong: expected the weight"),
    (WeightedSum, {"parts": PARTS, "weights": dict.fromkeys([*PARTS, "long"], 1.0)}, "weights.long: there is no such"),
    (WeightedSum, {"parts": PARTS, "weights": {"correct": 1.0, "overlong": inf}}, "weights.overlong is inf: must be"),
    *(
        (WeightedSum, {"parts": {name: ExactMatch()}, "weights": {name: 1.0}}, f"parts.{name}: expected a name")
        for name in ("mean", "a b")
    ),
    (JUDGE, {"model": ""}, "model is ''"),
    (JUDGE, {"template": "{prompt} {{response}}"}, "template has no {response}"),
    (JUDGE, {"options": {"messages": []}}, "options.messages: is set by this reward"),
    (JUDGE, {"score_pattern": None}, "exactly one must be set, not none"),
    (JUDGE, {"score_path": "a"}, "exactly one must be set, not score_pattern, score_path"),
    (JUDGE, {"score_pattern": "("}, "is not a regular expression"),
    (JUDGE, {"score_pattern": None, "score_function": "absent.py:f"}, "is 'absent.py:f': absent.py is no"),
    (JUDGE, {"min_score": 1.0, "max_score": 1.0}, "min_score is 1: must be below max_score"),
    (HTTP, {"fields": {"prompt": "prompt"}}, "fields has no response"),
    (HTTP, {"options": {"a": 1}}, "Set items_key, its key"),
    (HTTP, {"options": {"a": 1}, "items_key": "a"}, "options.a: is the key of the list of samples"),
    (HTTP, {"batch_size": 0}, "batch_size is 0"),
    (HTTP, {"error_score": nan}, "error_score is nan"),
    (HTTP, {"cache_gib": -1.0}, "cache_gib is -1"),
    (HTTP, {"on_error": "zero"}, "on_error is 'zero': expected one of raise, score"),
    # checkpoints, monitoring, trackers, sandboxes
    *((Retention, {name: 0}, f"{name} is 0") for name in ("keep_last_n", "keep_every")),
    (Retention, {"best_mode": "most"}, "best_mode is 'most'"),
    (Monitoring, {"max_skips": 0}, "max_skips is 0"),
    (Monitoring, {"spike_history": 2}, "spike_history is 2"),
    (Monitoring, {"spike_window": 5}, "spike_window is 5"),
    (Monitoring, {"spike_factor": 0.0}, "spike_factor is 0.0"),
    (Monitoring, {"max_dumps": -1}, "max_dumps is -1"),
    (Monitoring, {"dump_rows": 0}, "dump_rows is 0"),
    (Monitoring, {"plant_nan_at": 0}, "plant_nan_at is 0"),
    (Monitoring, {"on_non_finite": "ignore"}, "on_non_finite is 'ignore'"),
    (Console, {"sample_rows": -1}, "sample_rows is -1"),
    (TensorBoard, {"flush_s": 0}, "flush_s is 0"),
    (Trackers, {"jsonl": "yes"}, "jsonl"),
    (RemoteSandbox, {"endpoint": Endpoint(base_url="http://localhost:1", timeout_s=5.0)}, "endpoint.timeout_s"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused_by_name(kind, settings, message):
    with pytest.raises(ConfigError) as refused:
        kind(**settings)
    (fault,) = refused.value.faults
    assert message in fault


TWO_PROCESSES = ["trainer.n_gpus_per_node=2"]
CONTEXT, TENSORS = ([*TWO_PROCESSES, "sharding=parallel", f"sharding.{axis}=2"] for axis in ("cp", "tp"))
ADAPTER = ["rollout=vllm", "rollout.lora=adapter"]
LORA = "actor.lora={{_target_:verl.models.lora.LoRA,rank:{}}}"
AHEAD = ["trainer.rollout_ahead=1"]
CORRECTED = [*AHEAD, "algorithm.correction={_target_:verl.algorithms.importance_sampling.TruncatedIS}"]
BEHAVIOUR = ["algorithm.proximal=behaviour", "rollout=server", "rollout.endpoint.base_url=http://localhost:8000"]
IN_FLIGHT = ["rollout.weight_update=in_flight"]
ASYNC_2 = ["trainer.mode=async", "trainer.max_staleness=2"]
TOOLS = ["environment=calculator", "data=calculator", "critic=none", "algorithm=grpo"]
TOOLS += ["actor=tiny_scratch", "actor.model.context_length=160"]
REFUSED_RUNS = [  # overrides, and a part of the message
    # an engine and the actor
    ([*ADAPTER, LORA.format(600)], "actor.lora.rank is 600: vLLM takes adapters of at most rank 512"),
    (
        ["rollout=vllm", "rollout.call_timeout_s=600", "sharding=fsdp", *TWO_PROCESSES],
        "give it up after sharding.timeout_s 600. Set rollout.call_time",
    ),
    # drawing one step ahead
    (AHEAD, "requires importance weights"),
    (["trainer.mode=async"], "trainer.mode is async: responses come from older weights"),
    ([*CORRECTED, "algorithm.proximal=behaviour"], "correction is set, and proximal is behaviour"),
    ([*BEHAVIOUR, "rollout.log_probs=trainer"], "the engine records no log-probs of its own"),
    ([*CORRECTED, "rollout=auto"], "AutoRollout cannot generate while the weights are trained"),
    ([*CORRECTED, "rollout=vllm", "trainer.rollout_ahead=0", *ASYNC_2], "a sync of VLLMRollout waits for what it has"),
    (
        [*CORRECTED, "trainer=ray", "+trainer.placement.pools={a:[rollout,critic]}"],
        "the pool a has critic, rollout: rollout workers generate while the others work",
    ),
    ([*CORRECTED, "trainer=ray", "trainer.placement.in_driver=[rollout]"], "in_driver has rollout: "),
    (
        [
            *CORRECTED,
            "trainer=ray",
            "+trainer.placement.pools={s:[rollout]}",
            "+trainer.placement.workers={s:3}",
            "trainer.prompts_per_step=2",
        ],
        "has 3 workers of role rollout, and trainer.prompts_per_step is 2",
    ),
    (
        [*CORRECTED, "rollout=server", "rollout.endpoint.base_url=http://h:1", "trainer.rollout_ahead=0", *ASYNC_2],
        "nothing faster. Set trainer.max_staleness=1.",
    ),
    ([*AHEAD, "trainer.mode=async"], "or trainer.mode=sync, rollout_ahead=0."),
    ([*CORRECTED, "trainer.max_staleness=2"], "rollout_ahead is 1, which means mode=async with max_staleness=1"),
    ([*CORRECTED, "rollout.router_replay=true"], "trainer.rollout_ahead is 1: rollout.router_replay was not tried"),
    ([*CORRECTED, "rollout.weight_update=never"], "weight_update"),
    (
        [*CORRECTED, "rollout=server", "rollout.endpoint.base_url=http://localhost:8000", *IN_FLIGHT],
        "does not say which tokens were generated before",
    ),
    (
        [*CORRECTED, *TOOLS, "environment=agent_program", "environment.path=agent.py:run", *IN_FLIGHT],
        "environment is AgentProgram, and weights do not change within its episodes",
    ),
    ([*CORRECTED, "trainer.replay_schedule=run"], "only a run with rollout.weight_update=in_flight"),
    (["trainer.replay_schedule=run"], "trainer.mode is sync, which has no schedule"),
    ([*CORRECTED, "algorithm=dapo"], "selection draws further batches"),
    ([*CORRECTED, "algorithm=remax"], "greedy baseline"),
    ([*CORRECTED, "trainer.repeat_first_batch=true"], "every batch is the first"),
    ([*CORRECTED, "trainer.rollout_ahead=2"], "must lie in [0, 1]"),
    # what only a built role would find
    ([*CONTEXT, "actor.packing=off"], "actor.packing is off"),
    (
        ["actor=tiny_scratch", "actor.router_aux_loss_coef=0.01"],
        "actor.router_aux_loss_coef is 0.01: a qwen2 has no experts",
    ),
    ([*TENSORS, "actor.router_aux_loss_coef=0.01"], "actor.router_aux_loss_coef is 0.01: with tp 2"),
    ([*TENSORS, "actor.model.compile=true"], "actor.model.compile is true, and sharding.tp is 2"),
    ([*CONTEXT, "algorithm=ppo", "critic.packing=off"], "critic.packing is off"),
    # episodes
    ([*TOOLS, "rollout=scripted"], "ScriptedRollout draws no turns"),
    ([*TOOLS, "replay=tiered"], "the replay buffer does not keep the masks of episodes"),
    ([*TOOLS, "algorithm=remax"], "the greedy baseline of algorithm=remax was not tried"),
    ([*TOOLS, "algorithm=dapo"], "algorithm.selection was not tried with episodes"),
    ([*TOOLS, "rollout.min_new_tokens=2"], "a turn has no minimum"),
    ([*TOOLS, "environment=guess_number"], "the rows of data have no column 'secret'"),
    ([*TOOLS, "environment=none", "reward=environment"], "environment is null"),
    ([*TOOLS, "environment=none", "trainer.eval_without_tools=true"], "eval_without_tools is true, and environment"),
    ([*TOOLS, "environment.max_tokens=500"], "with environment.max_tokens 500 that makes 516 tokens"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED_RUNS)
def test_what_does_not_go_together_is_refused_by_name(overrides, message):
    with pytest.raises(ConfigError) as refused:
        validate(compose_root("ppo", overrides))
    assert message in str(refused.value)
