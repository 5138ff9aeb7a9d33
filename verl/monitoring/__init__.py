"""Monitoring of a run: non-finite numbers, the batches that caused them.

batch_dump       Batch dump: a batch with a non-finite number in the run directory
config           The group `trainer.safety`: what a run does when a number is not finite
log_prob_gap     The watch on `rollout/log_prob_gap_nats`
nonfinite        NonFiniteGuard: stops a run at non-finite numbers, or skips an update
ppo_metrics      Metrics of a policy-gradient step, of its episodes and of an evaluation; records of responses
"""
