"""Language models: where they come from, their heads, adapters and checks.

call           Calling a model with the inputs that it takes
heads          Heads on a backbone: the critic's value head, a reward model's score
hf_state_dict  A model's Hugging Face state dict in memory: which tensors under which names
interfaces     What each role asks of a model, and checks of it before training: outputs, left padding
lora           LoRA adapters through peft: few trained parameters, and the frozen model as the reference for free
model_stats    Size of a model from its configuration alone: parameters, activations, keys and values, operations
own_module     Any torch module as a policy: one of the user's own, or one that a library makes
parallel_info  What callers of a sharded model must know: its mesh and layouts, its device
pretrained     Any Hugging Face model, from a directory or from the hub; the base of all model components
tiny           The embedded model: a two-layer Qwen2 with a character tokenizer
"""
