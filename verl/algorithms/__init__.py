"""What makes one algorithm differ from another: advantages, policy and value losses, KL to the reference.

advantages     Advantage estimators: how the reward of a response is credited to its tokens
algorithm      An algorithm: an advantage estimator, a policy loss, a value loss and a KL choice
correction     Truncated importance sampling: responses drawn by one set of numbers, trained on under another
kl             How the policy is kept near the reference: not at all, through the reward, or through the loss
policy_losses  Policy losses: per token, from new log-probabilities and the batch they are compared with
reinforce      Estimators without a critic that keep close to REINFORCE: a return
reuse          Off-policy reuse: how much rows drawn by an earlier policy count in the update of the present one
selection      Which groups of responses a step trains on
value_losses   Value losses: per token, how far the critic is from the returns
"""
