"""Serves the policy by an OpenAI-compatible endpoint with exact token ids, for external agent programs.

conversations  Which tokens a request continues, and which requests make one row
sessions       Requests of one agent program, for one sample of one prompt
agent_program  Episodes that agent programs play in training
endpoint       Generates the turns of all requests as one batch, in a separate thread, and records them
chat_request   The body of a request: types and limits, and fields that are refused
token_bytes    The bytes of a token, also where it is a part of a character
http_api       Chat completions over HTTP: routes, limits and the form of replies
"""
