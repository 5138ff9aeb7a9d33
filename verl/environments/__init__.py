"""Episodes of several turns: environments, tools, and the loop that plays them beside a rollout engine.

    prompt ──> turn of the model ──> environment ──> observation ──> turn of the model ──> ... ──> one row of training

`base` is what an environment is, `episode_loop` plays episodes side by side, `calls` runs an environment's code with
deadlines and typed outcomes, `tool_calls` reads the calls in a turn, `observation_tokens` makes tokens of what comes
back, `rows` makes a batch of episodes, `journal` keeps them on disk as they are played. The others are
environments.
"""
