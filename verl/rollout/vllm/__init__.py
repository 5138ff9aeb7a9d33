"""vLLM as a rollout engine, in a separate process; the trainer's weights are streamed to it.

config       `rollout=vllm`
engine       vLLM among the engines in processes of their own: how it is set up, and what its errors mean
engine_args  Arguments of the vLLM engine, its environment and a model directory without weights
gpu_memory   GPU memory of a vLLM engine that shares a device with a trainer
options      Options of the vLLM engine
server/      The side of the vLLM process. Only this package imports vLLM
"""
