"""Rollout by a server that somebody else runs: vLLM's or another OpenAI-compatible one, or TGI."""
