"""Serves the policy by an endpoint of OpenAI's and Anthropic's APIs with exact token ids, for external agent programs.

conversations  Which tokens a request continues, which requests make one row, and the session of an agent program
agent_program  Episodes that agent programs play in training
endpoint       Generates the turns of all requests as one batch, in a separate thread, and records them
token_text     Text of tokens: what a stream may show, and where a stop text ends a turn
chat_request   The body of a request: types and limits, and fields that are refused
translate_chat, translate_responses, translate_messages
               Requests, answers and events of a stream of each API, from and to the form of chat completions
http_api       The APIs over HTTP: routes, limits and the form of replies
"""
