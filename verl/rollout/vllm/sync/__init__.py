"""Weights of a model to its engines: what one vLLM process holds, one sync of all ranks, and the transfer between them.

engine_weights   The weights of one vLLM process: load, adapter, verification, sleep
weight_sync      Weight syncs from a model to its engines: every byte that has to move does so once
weight_transfer  Weight transfer between the ranks of a sharded model
"""
