"""Workers on several hosts that torchrun has started: `torchrun --nnodes=2 ... -m verl.cli ppo ...`, without Ray.

agent         What a process of torchrun does for the driver: one worker on its host, started, relayed to and watched
messages      What the driver and an agent say to each other
rendezvous    How agents find the driver: its address and a key in torchrun's store, and authentication
worker_group  The driver's side: the same calls, futures and errors as with sibling processes
"""
