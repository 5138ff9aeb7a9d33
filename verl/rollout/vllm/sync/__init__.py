"""Weights of a model for its engines: state of one vLLM process, one sync of all ranks, and the transfer between ranks.

engine_weights   The weights of one vLLM process: load, adapter, verification, sleep
weight_sync      Weight syncs from a model to its engines; each byte is sent at most once
weight_transfer  Weight transfer between the ranks of a sharded model
"""
