"""The parts of an algorithm: advantages, policy and value losses, KL to the reference.

advantages              Advantage estimators: GAE and GRPO
algorithm               An algorithm: an advantage estimator, a policy loss, a value loss and a KL control
critic_free_advantages  Critic-free advantage estimators: RLOO, OPO, REINFORCE++ and ReMax
distillation            On-policy distillation: a teacher's part in advantages or loss
dynamic_sampling        Dynamic sampling (DAPO): selects the groups of responses that a step trains on
functions               Functions of a user as the advantage or the policy loss, and the state that such parts keep
importance_sampling     Truncated importance weights
kl                      KL control: none, through the reward, or through the loss
losses                  Policy and value losses, per token
preference_losses       Losses of preferences and of reward models: DPO, IPO, KTO, ORPO, SimPO, Bradley-Terry
"""
