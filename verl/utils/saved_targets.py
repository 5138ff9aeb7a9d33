"""`_target_`s that configurations saved by earlier versions name, and what they are called now.

Whoever parses a saved configuration or state passes it through `current_targets`, before training identity, reward
identity, differences and lineage are computed from it. A class that moves gets a row here.
"""

from __future__ import annotations

from typing import Any

_BEFORE_0_3_0 = {  # below `verl.`
    "algorithms.advantages.GroupRelative": "algorithms.advantages.GRPO",
    "algorithms.correction.TruncatedIS": "algorithms.importance_sampling.TruncatedIS",
    "algorithms.policy_losses.ClippedWeight": "algorithms.losses.CISPO",
    "algorithms.policy_losses.PPOClip": "algorithms.losses.PPOClip",
    "algorithms.policy_losses.PolicyLoss": "algorithms.losses.PolicyLoss",
    "algorithms.policy_losses.SequenceClip": "algorithms.losses.GSPO",
    "algorithms.reinforce.GreedyBaseline": "algorithms.critic_free_advantages.ReMax",
    "algorithms.reinforce.LeaveOneOut": "algorithms.critic_free_advantages.RLOO",
    "algorithms.reinforce.OptimalBaseline": "algorithms.critic_free_advantages.OPO",
    "algorithms.reinforce.RewardToGo": "algorithms.critic_free_advantages.ReinforcePlusPlus",
    "algorithms.reinforce.WhitenedGroupBaseline": "algorithms.critic_free_advantages.ReinforcePlusPlusBaseline",
    "algorithms.selection.MixedGroups": "algorithms.dynamic_sampling.DynamicSampling",
    "algorithms.value_losses.ClippedValueLoss": "algorithms.losses.ClippedValueLoss",
    "algorithms.value_losses.ValueLoss": "algorithms.losses.ValueLoss",
    "checkpoint.settings.Checkpointing": "checkpoint.config.Checkpointing",
    "cluster.mesh.DeviceMesh": "cluster.placement.DeviceMesh",
    "cluster.ray_placement.RayPlacement": "cluster.ray.ray_placement.RayPlacement",
    "data.options.PromptOptions": "data.base.PromptOptions",
    "data.options.SFTOptions": "data.base.SFTOptions",
    "data.splits.PromptSource": "data.base.PromptSource",
    "data.splits.TextSource": "data.base.TextSource",
    "engines.optim.AdamW": "engines.optimizer.AdamW",
    "hybrid.settings.HybridConfig": "hybrid.parallel.HybridConfig",
    "models.source.ModelSource": "models.pretrained.ModelSource",
    "remote.endpoint.Endpoint": "http_client.endpoint.Endpoint",
    "replay.settings.TieredReplay": "replay.config.TieredReplay",
    "rewards.exact_match.ExactMatch": "rewards.rules.ExactMatch",
    "rewards.format.Format": "rewards.rules.Format",
    "rewards.gsm8k:score": "rewards.math_rules:gsm8k_score",
    "rewards.length.Length": "rewards.rules.Length",
    "rewards.length.Overlong": "rewards.rules.Overlong",
    "rewards.math_answer.MathAnswer": "rewards.rules.MathAnswer",
    "rewards.math_rule:rate": "rewards.math_rules:math_score",
    "rewards.model.RewardModel": "rewards.reward_model.RewardModel",
    "rewards.normalized.Normalized": "rewards.normalization.RewardNormalization",
    "rewards.remote.RemoteDescription": "rewards.remote.remote_base.RemoteDescription",
    "rewards.remote_chat.RemoteChat": "rewards.remote.llm_judge.LLMJudge",
    "rewards.remote_http.RemoteHTTP": "rewards.remote.http_reward.HTTPReward",
    "rollout.scripted.Scripted": "rollout.scripted.ScriptedRollout",
    "rollout.server.options.ServerRollout": "rollout.server.config.ServerRollout",
    "rollout.vllm.options.VLLMRollout": "rollout.vllm.config.VLLMRollout",
    "safety.log_prob_gap.LogProbGapLimit": "monitoring.log_prob_gap.LogProbGapLimit",
    "safety.settings.Safety": "monitoring.config.Monitoring",
    "storage.options.BucketStorage": "storage.config.BucketStorage",
    "storage.options.GCSStorage": "storage.config.GCSStorage",
    "storage.options.LocalStorage": "storage.config.LocalStorage",
    "storage.options.MemoryStorage": "storage.config.MemoryStorage",
    "storage.options.OSSStorage": "storage.config.OSSStorage",
    "storage.options.S3Storage": "storage.config.S3Storage",
    "storage.options.Storage": "storage.config.Storage",
    "tracking.curves.Curves": "tracking.plots.Curves",
    "tracking.tracker.TrackerDescription": "tracking.base.TrackerDescription",
    "tracking.trackers.Trackers": "tracking.base.Trackers",
    "trainer.given.GivenModel": "trainer.api.from_objects.ModelObject",
    "trainer.given.GivenPrompts": "trainer.api.from_objects.PromptsObject",
    "trainer.given.GivenReward": "trainer.api.from_objects.RewardObject",
    "trainer.ppo.PPORun": "trainer.ppo_config.PPORun",
    "trainer.profiling.Profile": "trainer.timers.Profile",
    "trainer.settings.LoopSettings": "trainer.config.LoopSettings",
    "trainer.settings.PPOSettings": "trainer.config.PPOSettings",
    "trainer.settings.SFTSettings": "trainer.config.SFTSettings",
    "workers.hosts.RLHost": "workers.colocated.RLHost",
    "workers.hosts.SFTHost": "workers.colocated.SFTHost",
    "workers.training.TrainedRole": "workers.base.TrainedRole",
}
RENAMED = {f"verl.{old}": f"verl.{new}" for old, new in _BEFORE_0_3_0.items()}


def current_targets(saved: Any) -> Any:
    """A parsed JSON or YAML value with every string that is a former name replaced by the present one, and without
    defaults of before that had no effect and are refused now."""
    if isinstance(saved, dict):
        return _without_effectless({key: current_targets(value) for key, value in saved.items()})
    if isinstance(saved, list):
        return [current_targets(value) for value in saved]
    return RENAMED.get(saved, saved) if isinstance(saved, str) else saved


def _without_effectless(saved: dict[str, Any]) -> dict[str, Any]:
    """`num_workers` beside a reward function of the whole batch, which is one call: 4 by default, later 1."""
    is_of_batch = saved.get("_target_") == "verl.rewards.function.RewardFunction" and not saved.get("per_sample")
    return {**saved, "num_workers": None} if is_of_batch and saved.get("num_workers") in (1, 4) else saved
