"""From texts to scores: rules, functions of the user, reward models, remote judges.

base           From texts to scores: what a reward is, and how its scores reach the tokens
exact_match    The reward that is 1 where a response is the answer, and 0 elsewhere
format         The reward for keeping to a form: a regular expression that the response matches
function       Rewards by a Python function of the user, named in the configuration or passed as it is
gsm8k          The rule for grade-school mathematics: the number that a response ends with, compared as a number
length         Rewards of the length of a response, in tokens as the policy chose them
locate         Find the function that `module:function` or `file.py:function` names: by reading its source first
math_answer    The reward for a right answer to a mathematical question, however it is written
math_rule      Whether two mathematical answers are the same; light
model          Rewards by a model: any sequence-classification model of Hugging Face, whatever its tokenizer
normalized     Any reward on a scale of its own
outcomes       What became of each sample that a server was asked about
pool           Worker processes that rate single samples, each of which can be killed and replaced
reading        What a reward model reads of a batch: the one place where rows become token ids of its tokenizer
remote         What every reward does that asks a server: cache, questions, failures, counts
remote_chat    Rewards by a judge
remote_http    Rewards by a scoring service: a JSON list of samples is posted, a JSON list of scores comes back
results        Check what a reward function returned, and say which sample it got wrong
running_norm   Scores on a scale of their own: less the mean and over the standard deviation of all scores so far
sample_worker  A process that rates one sample after another: `python -m verl.rewards.sample_worker`
samples        Rewards of one response at a time
score_text     From what a judge wrote to a number: by a pattern, or at a place in JSON
signature      Which keyword arguments a reward function takes, and whether the data has them
template       Texts with places for columns of the data: `Question: {prompt} ... {answer}`
weighted_sum   Several rewards as one: their weighted sum, each part logged by its name
"""
