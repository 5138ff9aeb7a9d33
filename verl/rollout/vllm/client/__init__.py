"""The trainer's side: the engine's process, its arguments, and calls to it.

client          vLLM as the trainer sees it: prompts out, responses in, weights synced
engine_args     Arguments of the vLLM engine, its environment and a model directory without weights
engine_process  The vLLM process: started, called and killed by the trainer. It ends with the trainer
gpu_memory      GPU memory of a vLLM engine that shares a device with a trainer
turns           Turns by vLLM, as the trainer sees them
"""
