"""Execution paths of models (packed, cached, padded), and checks of which are correct for a model.

check             Execution paths of a model: those tried for its family, or plain ones; comparisons with plain passes
context_attention Attention over packed rows whose tokens are divided over processes
decode            Decoding of rows that begin together, with the model's own cache; CUDA graphs of steps
expert_routing    Choices of expert routers: recorded, counted and replayed
families          Execution paths of a model, and those that were tried for families of language models in transformers
images            Images in rows: where their features go, and the positions of the tokens around them
kv_cache          A key-value cache of slots: rows of individual lengths, and prompts that several rows share
micro_batch       Micro-batches: the tensors of one forward pass
packed_attention  Attention over packed rows
"""
