"""From texts to scores: rules, functions of the user, reward models, remote judges.

base           From texts to scores: what a reward is, and how its scores reach the tokens
code_tests     Rewards by running code: the program in a response against the tests of its row, in a sandbox
function       Rewards by a Python function of the user, named in the configuration or passed as it is
import_path    Imports the function that `module:function` or `file.py:function` names
math_rules     Rules for mathematical answers as functions of text. Light
normalization  Reward normalisation: scores less the running mean
pool_worker    The main program of a pool process: `python -m verl.rewards.pool_worker`
process_pool   A pool of worker processes that score one sample at a time
remote/        Rewards that a server gives: an LLM judge or a scoring service
reward_model   Rewards by a model: any sequence-classification model of Hugging Face, whatever its tokenizer
rules          Rewards by rules: exact match, regular expression, response length
validation     Validation of a reward function: the keyword arguments it takes, and what it returned
weighted_sum   A weighted sum of several rewards, each logged by its name
"""
