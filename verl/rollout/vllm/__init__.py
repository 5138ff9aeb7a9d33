"""vLLM as a rollout engine, in a separate process; the trainer's weights are streamed to it.

client/     The trainer's side: the engine's process, its arguments, and calls to it
config      `rollout=vllm`
messages    Messages between the trainer and the vLLM process, over a socket pair
options     Options of the vLLM engine
server/     The side of the vLLM process. Only this package imports vLLM
shm_stream  A stream of weights into an engine through shared memory: two chunks, filled by the trainer
state_dict  The trainer's weights by their checkpoint names, one tensor at a time, for an engine to load
sync/       Weights of a sharded model to the engines: transfer plan, one sync, one engine per group of ranks
"""
