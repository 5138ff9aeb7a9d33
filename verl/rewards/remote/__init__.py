"""Rewards from a server: an LLM judge or a scoring service.

http_reward   Scoring service: a JSON list of samples is posted, a JSON list of scores comes back
llm_judge     LLM judge: a chat model behind an OpenAI-compatible server reads prompt and response and writes a score
remote_base   Base class of rewards from a server: requests, failures, cache, and scores parsed from replies
"""
