"""What each role does with a DataProto, in whatever process it lives.

actor        The actor: one set of weights that generates, scores and trains
critic       The critic: values of every state along a response, and their regression on returns
first_batch  The first real batch of a role: some of its rows, as the role computes them
gathering    A divided model's tensors made whole, each on one process, one after the other
hosts        Which roles live together in one process, and how that process builds them
learner      The learner of supervised fine-tuning: a causal language model and the likelihood of given text
parts        What one process of several writes of a checkpoint: its slices of optimizers
reference    The reference: the frozen policy that KL is measured against
reload       A checkpoint taken into a role that is running: straight into its live tensors
reward       A reward that is a model, as a role: rated where it lives, normalised in the driver
state        What a role hands over for a checkpoint, and how it takes it back
training     What actor and critic have in common: a model that trains, its optimizer, its cut into micro-batches
"""
