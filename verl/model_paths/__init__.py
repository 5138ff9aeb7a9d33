"""The ways of running a model (packed, cached, padded), and the proof of which are right for it.

check             Which ways of running a model give what a plain forward pass of each row gives
classifier        How the texts of a reward model may be scored beside each other, found by trying on its twin
decode            A decode loop over a key-value cache, on the very tensors that train
families          Which ways of running a model are open to the families of causal language models that
kv_cache          A key-value cache that is written in place: a new token copies itself alone
micro_batch       From a batch to the tensors of one forward pass: padded rows
packed_attention  Attention over a packed line of tokens
paths             The ways of running a model, and which of them were shown to be right for one
report            What was found of models, in words and as rows of a table. Imports the standard library alone
small_config      A model configuration made small: fewer layers, narrower ones
store             What trials have found, kept on disk by a digest of all that it depends on
trial             Rows of a trial, and what each way of running a model gives for them
twin              The twin: a small model of the same class, code and kinds of layers
"""
