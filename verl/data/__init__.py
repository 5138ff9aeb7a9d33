"""Data sets: rows of files as prompts or as sequences for supervised fine-tuning.

arithmetic    Addition problems such as `37+58=`, made in memory, with held-out ones that training never sees
bad_rows      What happens to rows that cannot be used: they stop the run, or they are left out and counted
conversation  The tokens of a conversation, and which of them the assistant wrote
files         Data sets that lie in files of the user: prompts for reinforcement learning
learnable     From rows to tokens of which some are learned: a completion
options       The settings of the data sets, as one frozen description each
prompts       From the prompt column to text and tokens: texts as they are, chat messages through a template
rlhf_dataset  Prompts for reinforcement learning, tokenised once and padded on the left when a batch is made
rows          Rows read from parquet and JSONL files, each of which knows where it came from
sampler       The order in which training visits its data: a seeded order per epoch, whose state is three numbers
sft_dataset   Prompts with the completions to imitate
splits        What a data description builds: the rows to train on and the rows to evaluate on
tokens        Rows of tokens: cutting long ones, and keeping ragged ones in one flat tensor
"""
