"""Data sets: rows of files as prompts or as sequences for supervised fine-tuning.

arithmetic     Generated addition problems such as `37+58=`, with a held-out set for evaluation
base           Base classes and settings of data sets: `DataSplits`, options of prompts and SFT, tokenised rows
calculator     Sums and products that the built-in model cannot compute, for the tool `calc`
chat_task      Generated tasks for small chat models, with their answers
chat_template  Chat templates: the prompt column as text and tokens, conversations as tokens
curriculum     Curricula: prompts are sampled by their recorded pass rates; resumes exactly
episodes       `data=episodes`: prompts for environments that provide the task themselves
files          Data sets in files: prompts for reinforcement learning, sequences for SFT, preferences
guess_number   Prompts and example games of guessing a number
hub            `data=hub`: prompts from the Hugging Face hub, or a local directory of the same form
images         Images of rows: where they are, the check of all before a run, and the fields of a batch
preference_dataset  Pairs of responses, or responses with a label, tokenised
readers        Readers of parquet and JSONL files; each row has its file and line number
rlhf_dataset   Prompts for reinforcement learning, tokenised once and padded on the left when a batch is made
sampler        The data sampler: a seeded order per epoch, whose state is three numbers
shapes         Pictures of shapes, made by NumPy, and questions about them
sft_dataset    Supervised fine-tuning data
"""
