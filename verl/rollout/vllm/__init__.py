"""vLLM as a rollout engine, in a separate process; the trainer's weights are streamed to it.

client/     Requests to the vLLM process, and its life cycle
config      `rollout=vllm`
engine      The engine: requests, weights, and handling of failures
messages    Messages between the trainer and the vLLM process, over a socket pair
options     Options of the vLLM engine
server/     The side of the vLLM process. Only this package imports vLLM
shm_stream  A stream of weights into an engine through shared memory: two chunks, filled by the trainer
state_dict  The trainer's weights by their checkpoint names, one tensor at a time, for an engine to load
sync/       Weights of the engines: state of one, one sync of all ranks, transfer between them
"""
