"""Weights of a model to its engines: what one process holds, one sync of all ranks, and the transfer between them.

engine_weights  The weights of the process of an engine: load, adapter, verification, sleep
state_dict      The trainer's weights by their checkpoint names, one tensor at a time, for an engine to load
stream          A stream of weights into an engine through shared memory: its plan, writer and reader
sync            Weight syncs from a model to its engines: every byte that has to move does so once
transfer        Weight transfer between the ranks of a sharded model
"""
