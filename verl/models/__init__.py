"""Language models: where they come from, their heads, adapters and checks.

fused_norms    RMS norms by torch's fused kernel
gguf           GGUF files as models, and models that come in Python packages
heads          Heads on a backbone: the critic's value head, a reward model's score
hf_state_dict  A model's Hugging Face state dict in memory: tensors and their names
images         Image-text models: the processor of their images, and their vision tower
interfaces     The interface that each role expects of a model, and checks of it
lora           LoRA adapters through peft: few trained parameters; the base model is the reference policy
model_files    Files in a model's directory: damaged ones, errors about them, and a reader of weights
model_stats    Size of a model from its configuration alone, which is shipped for common models on the hub
own_module     Any torch module as a policy, user-defined or from a library
parallel_info  Mesh, layouts and device of a sharded model, for its callers
pretrained     Any Hugging Face model, from a directory or from the hub; the base of all model components
structure      The structure of a model: which inputs it accepts, the layers around it, its experts and routers
tiny           The built-in model: a two-layer Qwen2 with a character tokenizer
turn_end       The token with which a chat template ends a turn of the assistant
"""
