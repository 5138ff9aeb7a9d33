"""Computation of each role on a DataProto, independent of its process.

actor              The actor: one set of weights that generates, scores and trains
base               Base of actor, critic and SFT worker: a model that trains, its optimizer, its micro-batches
colocated          Which roles share one process, and how that process builds them
critic             The critic: values of every state along a response, and their regression on returns
first_batch_check  A check of a role's first batch: some of its rows, as the role computes them
load_state         A role's state for a checkpoint, and loading it: when the role is built
open_batches       Batches that are generated while weights change: rows, and the episodes that these are turns of
preference         Learners of preferences: a policy, and a reward model, trained on one coefficient per row
rank_checkpoint    One rank's part of a checkpoint: its slices of the optimizer
reference          The reference: the frozen policy that KL is measured against
reward             A reward model as a role: scores are computed where it lives and normalised in the driver
rollout_worker     The role `rollout`: a rollout engine in a process of its own, with a copy of the actor's model
schedule           The schedule of an engine: before which of its steps events were carried out, for a replay
sft                The SFT worker: a causal language model trained by the likelihood of given text
step_loop          Generation in steps of an engine, with events between them: weights in the middle of a response
"""
