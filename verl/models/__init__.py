"""Language models: where they come from, their heads, adapters and checks.

call            Calling a model with the inputs that it takes
division        What those who call a model must know of it if its weights are divided over processes
heads           A value head on any backbone: the critic's model
interfaces      What each role asks of a model, and whether a model offers it
lora            Low-rank adapters through peft: few trained parameters, and the frozen model for free
output_head     A causal language model without its output head
precision       Computing in a narrower type than the weights are kept in
pretrained      Any Hugging Face model, from a directory or from the hub
saved_form      A model as Hugging Face saves it, but in memory: which tensors under which names
scores          A reward model: any sequence-classification model as one that reads token ids and returns
sizes           How large a model is, from its configuration alone: parameters, activations, keys and values
source          What a description of a model offers: a causal language model, a bare backbone, a tokenizer
tiny            The embedded model: a two-layer Qwen2 over characters
tiny_tokenizer  A tokenizer of single characters, made in memory, for small models and tests
tokenizers      Whether two models read the same token ids the same way
weight_files    The safetensors files of a Hugging Face directory, read in slices
"""
