"""Serves the policy by an OpenAI-compatible endpoint with exact token ids, for external agent programs.

conversations  Which tokens a request continues, which requests make one row, and the session of an agent program
agent_program  Episodes that agent programs play in training
endpoint       Generates the turns of all requests as one batch, in a separate thread, and records them
chat_request   The body of a request: types and limits, and fields that are refused
http_api       Chat completions over HTTP: routes, limits and the form of replies
"""
