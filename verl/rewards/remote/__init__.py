"""Rewards from a server: an LLM judge or a scoring service.

http_reward   Scoring service: a JSON list of samples is posted, a JSON list of scores comes back
llm_judge     LLM judge: a chat model behind an OpenAI-compatible server reads prompt and response and writes a score
remote_base   Base of rewards that ask a server: cache, requests, failures, statistics
score_parser  Prompt templates with columns of the data, and scores parsed from a judge's text: by a pattern
"""
