"""Rollout by an external server: vLLM, another OpenAI-compatible one, or TGI.

client         The engine of `rollout=server`: one request for each turn; log-probs of fixed text
config         `rollout=server`
connect        Connects to a server before the first response, and checks that it serves the actor's model
options        Options of `rollout=server`: where the server is, its protocol, and whether it takes new weights
protocols      Protocols of inference servers
weight_update  Weight updates of a vLLM server: files in a shared directory, loaded by its reload
"""
