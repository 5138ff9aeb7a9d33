"""Prompts in; responses and their log-probabilities out.

auto              `rollout=auto`: chooses the engine that was faster in measurements with models of this size
base              The interface of rollout engines: turns, sync, offload, close
data_responses    Responses of the data set in place of sampled ones, for distillation
engine_process/   The processes of engines of any kind: life cycle, calls, turns
generation_group  How the processes that hold one model divide the generation of responses, and agree on failures
hf                `rollout=hf`: generation on the tensors that train
hf_rows           Rows that `rollout=hf` decodes beside each other, in slots of a key-value cache or in batches
lockstep          Episodes of processes that compute every forward pass together: one plays, all generate
model_log_probs   Log-probs by the model that trains: of the fixed rows of a proof, of responses without any
process_engine    An engine in a process of its own: requests, syncs of weights, repeats after a failure
responses         Responses to prompts, sampled as single turns of a rollout engine
rows              Rows of prompts with their responses, made of turns and checked
scripted          Scripted responses, for tests and for replaying text
server/           Rollout by an external server: an OpenAI-compatible one that takes token ids, or TGI
token_sampler     From logits to the next token of each row: the sampling rule of every rollout engine
vllm/             vLLM as a rollout engine, in a separate process; the trainer's weights are streamed to it
weight_sync/      Weights of a model to its engines: streams, transfer between ranks, syncs
proof/            Proves after a weight sync that an engine holds the trainer's weights
"""
