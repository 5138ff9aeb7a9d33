"""Serves the policy by an OpenAI-compatible endpoint with exact token ids, for external agent programs.

conversations  Which tokens a request continues, and which requests make one row
sessions       Requests of one agent program, for one sample of one prompt
agent_program  Episodes that agent programs play in training
endpoint       Generates the turns of all requests as one batch, in a separate thread, and records them
http_api       Chat completions over HTTP: supported request fields and the form of replies
"""
