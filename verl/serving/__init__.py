"""The policy behind an OpenAI-compatible endpoint that is exact in tokens, for agent programs that are not verl's.

conversations  Which tokens a request continues, and which requests make one row
sessions       Requests of one agent program, for one sample of one prompt
agent_program  Episodes that agent programs play in training
endpoint       Draws the turns of all requests side by side, in a thread of its own, and records them
http_api       Chat completions over HTTP: what a request may say, and what is answered
"""
