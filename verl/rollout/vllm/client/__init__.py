"""Requests to the vLLM process, and its life cycle.

engine_args     Arguments of the vLLM engine, its environment and a model directory without weights
engine_process  The vLLM process: started, called and killed by the trainer. It ends with the trainer
gpu_memory      GPU memory of a vLLM engine that shares a device with a trainer
turns           Requests to the vLLM process: turns in, tokens out
"""
