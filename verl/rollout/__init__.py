"""Prompts in; responses and their log-probabilities out.

auto              `rollout=auto`: chooses the engine that was faster in measurements with models of this size
base              The interface of rollout engines: turns, sync, offload, close
data_responses    Responses of the data set in place of sampled ones, for distillation
generation_group  Division of generation among the processes of one model, and agreement on failures
hf                `rollout=hf`: generation on the tensors that train
hf_rows           Batched rows of `rollout=hf`, in slots of a key-value cache or in batches
lockstep          Episodes under tensor parallelism: one process plays, all generate
probe_log_probs   The trainer's log-probs of the few fixed rows that both sides of a sync compute
responses         Responses to prompts, sampled as single turns of a rollout engine
rows              Rows of prompts with their responses, made of turns and checked
scripted          Scripted responses, and the base class of engines that generate whole batches
server/           Rollout by an external server: vLLM, another OpenAI-compatible one, or TGI
token_sampler     From logits to the next token of each row: the sampling rule of every rollout engine
vllm/             vLLM as a rollout engine, in a separate process; the trainer's weights are streamed to it
proof/            Proves after a weight sync that an engine holds the trainer's weights
"""
