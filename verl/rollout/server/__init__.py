"""Rollout by a server that somebody else runs: vLLM, another OpenAI-compatible one, or TGI.

openai    The protocol of `POST /v1/completions` with token ids both ways, as vLLM speaks it
options   What `rollout=server` is told: where the server is, how it speaks, and whether it takes new weights
probing   Whether a server computes what the trainer does, and what its log-probs mean: fixed text, asked of both
protocol  What a server is asked for and gives, whatever the protocol
sampler   The running engine of `rollout=server`: one request for each response
starting  Before the first response: is the server there, is it fit, has it the actor's model
tgi       The protocol of `POST /generate` of Text Generation Inference (TGI): prompts as text
transfer  New weights for a vLLM server: written where it can read them, and read by its own reload
values    From the JSON of a server to typed values: the one place where token ids
"""
