"""Prompts in; responses and their log-probabilities out.

auto      The engine that measurements favour for the model at hand
base      What every rollout engine takes and gives: a request, and rows of prompts with their responses
drawing   From logits to the next token of each row: the one rule that every engine of ours draws by
hf        Rollout on the very tensors that train
scripted  Responses that are given beforehand: for tests, and for replaying text that another system wrote
server/   Rollout by a server that somebody else runs: vLLM, another OpenAI-compatible one, or TGI
vllm/     vLLM as a rollout engine, in a process of its own; the trainer's weights are streamed to it
"""
