"""Weights of a sharded model to the engines: transfer plan, one sync, one engine per group of ranks.

sharded_client   vLLM beside a sharded model: one engine for each group of ranks that work on the same rows
weight_sync      One weight sync from a sharded model to its engines: every byte that has to move does so once
weight_transfer  Weight transfer between the ranks of a sharded model
"""
