"""Prompts in; responses and their log-probabilities out.

auto           `rollout=auto`: chooses the engine that was faster in measurements with models of this size
base           The interface of rollout engines: a generation request, and rows of prompts with their responses
hf             `rollout=hf`: generation on the tensors that train
scripted       Scripted responses: for tests, and for replaying text that another system wrote
server/        Rollout by an external server: vLLM, another OpenAI-compatible one, or TGI
token_sampler  From logits to the next token of each row: the sampling rule of every rollout engine
vllm/          vLLM as a rollout engine, in a separate process; the trainer's weights are streamed to it
"""
