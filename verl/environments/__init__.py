"""Episodes of several turns: environments, tools, and the loop that plays episodes with a rollout engine.

    prompt ──> turn of the model ──> environment ──> observation ──> turn of the model ──> ... ──> one row of training

`base` defines the interface, `episode` holds the state of an episode and its training rows, `episode_loop` plays many
episodes concurrently, `tools` describes tools to the model, `calls` runs an environment's code with deadlines and typed
outcomes, `tool_calls/` parses the tool calls of a turn, `observation_tokens` tokenizes observations and, with
`history=rerender`, whole conversations, and `journal` records running episodes on disk. The other modules are
environments: `calculator`, `guess_number`, `mcp_tools`, `python_sandbox`, and those in separate processes (`hosted`, on
top of `hosts/`).
"""
