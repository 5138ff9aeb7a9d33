"""The parts of an algorithm: advantages, policy and value losses, KL to the reference.

advantages              Advantage estimators: GAE and GRPO
algorithm               An algorithm: an advantage estimator, a policy loss, a value loss and a KL control
critic_free_advantages  Critic-free advantage estimators: RLOO, OPO, REINFORCE++ and ReMax
distillation            On-policy distillation: a teacher's part in advantages or loss
dynamic_sampling        Dynamic sampling (DAPO): selects the groups of responses that a step trains on
functions               A function of a user as the advantage or the policy loss
importance_sampling     Truncated importance weights
kl                      KL control: none, through the reward, or through the loss
losses                  Policy and value losses, per token
part_state              State of estimators and losses: what a checkpoint holds, and a trial that finds the rest
preference_losses       Losses of preferences and of reward models: DPO, IPO, KTO, ORPO, SimPO, Bradley-Terry
"""
