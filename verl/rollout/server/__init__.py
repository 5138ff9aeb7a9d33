"""Rollout by an external server: an OpenAI-compatible one that takes token ids, or TGI.

checks         Checks before the first response that a server serves the actor's model, with usable log-probs
client         The engine of `rollout=server`: one request for each turn; log-probs of fixed text
config         `rollout=server`
options        Options of `rollout=server`: where the server is, its protocol, and whether it takes new weights
protocols      Protocols of inference servers
weight_update  Weight updates of a server: files in a shared directory, which it is asked to read
"""
