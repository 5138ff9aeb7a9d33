"""Rewards: scores of texts by rules, user-defined functions, reward models and remote judges.

async_rewards   Rewards of groups that finish before their batch is trained on, computed in a thread
base            From texts to scores: the base class of rewards, scores on tokens, checks of a reward function
chat_rewards    Rewards of the tasks of `data=chat_task`, as functions of texts
code_tests      Rewards by running code: the program in a response is tested in a sandbox
deadline        Deadlines for calls of user code in this process
episode_reward  `reward=environment`: rewards from the environment, each on the last token of its turn
function        Rewards by a user-defined Python function, given by its path or as an object
math_rules      Rules for mathematical answers, as functions of text; imports little
normalization   Reward normalisation: scores less the running mean
pool_worker     The main program of a pool process: `python -m verl.rewards.pool_worker`
process_pool    A pool of worker processes that score one sample at a time
remote/         Rewards from a server: an LLM judge or a scoring service
reward_model    Rewards by a model: any sequence-classification model of Hugging Face, with any tokenizer
rules           Rewards by rules: exact match, regular expression, response length
signatures      Reward functions with the arguments of verl and TRL
weighted_sum    A weighted sum of several rewards, each logged by its name
"""
