"""vLLM as a rollout engine, in a process of its own; the trainer's weights are streamed to it.

agreeing      What the processes of a divided model do together around engines that may fail: go on, or stop
child         The engine's process: `python -m verl.rollout.vllm.child`, started by `process.py` alone
delivery      Weights on their way from the processes that hold them, divided, to those that feed an engine
divided       vLLM beside a model that is divided over processes: one engine for each group of siblings
engine        vLLM as the trainer sees it: prompts out, responses in, and weights that follow
extension     What vLLM's own worker processes do for us: take weights from the stream, draw by our noise
faults        What vLLM says when it cannot start, in terms of our configuration
feeds         What goes through a stream of weights, told beforehand: which tensor lies where in which chunk
files         Files and shared memory of one engine under names of its own, and all of it removed
hosted        The engine as its own process holds it: each public method is a call that the trainer can make
landing       Where the tensors of the stream land: in the engine's own layers, found once
leading       The engine of a group of processes, as the first of them holds it: each thing is done once
messages      Messages between the trainer and the engine's process
noise         Our sampling noise inside vLLM: a logits processor that leaves one token to choose
options       What can be chosen of `rollout=vllm`
planned_sync  A sync of engines with a model that is divided over processes
process       The engine's process as the trainer sees it: started, called, killed; it ends with the trainer
setting       What the engine's process is given: arguments of vLLM, variables, and a model without weights
shares        Which process feeds what to which worker of an engine: one of them all of it
stream        Weights on their way into an engine: two chunks of memory
sync_part     One process's part of one sync: what it holds goes to who wants it
told          What the engine's process tells the trainer, who need not import vLLM to read it
weights       The trainer's weights under the names of their checkpoint, one tensor at a time
"""
