"""What makes one algorithm differ from another: advantages, policy and value losses, KL to the reference.

advantages              Advantage estimators: GAE and GRPO
algorithm               An algorithm: an advantage estimator, a policy loss, a value loss and a KL choice
critic_free_advantages  Critic-free advantage estimators: RLOO, OPO, REINFORCE++ and ReMax
dynamic_sampling        Dynamic sampling (DAPO): which groups of responses a step trains on
importance_sampling     Truncated importance weights
kl                      KL control: how the policy is kept near the reference; not at all, through the reward
losses                  Policy and value losses, per token
"""
