"""Monitoring of a run: non-finite numbers, the rows that caused them.

batch_dump       Attribution and batch dump: the rows behind a non-finite number
config           The group `trainer.safety`: what a run does when a number is not finite
log_prob_gap     The watch on `rollout/log_prob_gap_nats`
nonfinite        NonFiniteGuard: stops or skips steps with non-finite numbers
ppo_metrics      Metrics of a policy-gradient step, of its episodes and of an evaluation; records of responses
"""
