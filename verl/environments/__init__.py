"""Episodes of several turns: environments, tools, and the loop that plays them beside a rollout engine.

    prompt ──> turn of the model ──> environment ──> observation ──> turn of the model ──> ... ──> one row of training

`base` defines the interface, `episode` is the state of one and its rows of training, `episode_loop` plays many
episodes concurrently, `calls` runs an environment's code with deadlines and typed outcomes, `tool_calls/` parses the
tool calls of a turn, `observation_tokens` tokenizes observations, `journal` records them on disk while they are
played. All other modules are environments.
"""
