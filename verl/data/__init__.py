"""Data sets: rows of files as prompts or as sequences for supervised fine-tuning.

arithmetic     Addition problems such as `37+58=`, made in memory, with held-out ones that training never sees
base           Base classes and settings of data sets: what a data component builds, and its options
chat_template  Chat templates: the prompt column as text and tokens, conversations as tokens
files          Data sets in files of the user: prompts for reinforcement learning
readers        Readers of parquet and JSONL files. Each row knows its file and number
rlhf_dataset   Prompts for reinforcement learning, tokenised once and padded on the left when a batch is made
sampler        The data sampler: a seeded order per epoch, whose state is three numbers
sft_dataset    Supervised fine-tuning data
tokenization   Tokenised rows: cutting long ones, and keeping ragged ones in one flat tensor
"""
