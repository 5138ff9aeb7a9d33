"""Computation of each role on a DataProto, independent of its process.

actor              The actor: one set of weights that generates, scores and trains
base               Base of actor, critic and SFT worker: a trained model, its optimizer, its micro-batches
colocated          Roles that share one process, and how that process builds them
critic             The critic: values of every state along a response, and their regression on returns
first_batch_check  A check of a role's batches: some rows, compared with a plain forward pass of each
load_state         A role's state for a checkpoint, and loading it
open_batches       Batches that are generated while weights change: their rows, and episodes of rows
preference         Preference learning: a policy, and a reward model, trained on one coefficient per row
rank_checkpoint    One rank's part of a checkpoint: its slices of the optimizer, its tensors of the model
reference          The reference: the frozen policy that KL is measured against
reward             A reward model as a role: scores are computed in its processes, normalised in the driver
rollout_worker     The role `rollout`: a rollout engine in its own process, with a copy of the actor's model
schedule           The schedule of an engine: before which steps events were processed, for replay
sft                The SFT worker: a causal language model trained on the likelihood of given text
step_loop          Generation in steps of an engine, with events between them, such as new weights
"""
