"""Processes that run environments. `host_process` and `host_pool` are the trainer's side; the other modules import
nothing from this package, so that another interpreter can run them.

gymnasium_adapter      Environments of gymnasium, with text observations and actions
host_main              The process that runs environments: requests as JSON lines, replies on its standard output
host_pool              A pool of host processes, and the environments in them
host_process           The trainer's side of a host process
program_adapter        An agent program for each episode: a user's function, or a command
python_tools           Functions as tools: JSON schemas, validated arguments, results as text
reasoning_gym_adapter  A task of reasoning_gym: one question, one answer
textarena_adapter      A game of textarena for one player
verifiers_adapter      A task of the package verifiers, turn by turn
"""
