"""The ways of running a model (packed, cached, padded), and the proof of which are right for it.

check             Which ways of running a model are right for it
classifier        How the texts of a reward model may be scored beside each other, found by trying on its twin
decode            A decode loop over a key-value cache, on the very tensors that train
families          Which ways of running a model are open to the families of causal language models that
finding_cache     A cache on disk of what trials have found of models, by a digest of all that it depends on
kv_cache          A preallocated key-value cache: a new token copies itself alone, not all that came before it
micro_batch       Micro-batches: the tensors of one forward pass
packed_attention  Attention over packed rows
paths             The ways of running a model, and which of them were shown to be right for one
report            What was found of models, in words and as rows of a table. Imports the standard library alone
trial             Rows of a trial, and what each way of running a model gives for them
twin              The twin of a model: a small one of the same class, code and kinds of layers
"""
