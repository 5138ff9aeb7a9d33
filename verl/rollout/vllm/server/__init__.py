"""The side of the vLLM process. Only this package imports vLLM.

engine_server     The engine as the vLLM process holds it: each public method is a call that the trainer can make
expert_recorder   Experts that the routers chose for the tokens that predict a response, for router replay
images            Images in requests, as the processor of the trainer has made them
layer_fingerprints
                  Fingerprints of the model's parameters, taken through its layers
logits_processor  Counter-based sampling noise inside vLLM: a logits processor that leaves one token
turns             Turns in the vLLM process: its requests, and its prefix cache
verification      Fingerprints and log-probs of the engine, for the proof of a sync
weight_loader     Loads streamed tensors in place into the engine's layers; destinations are computed once
worker_extension  Methods added to vLLM's worker processes: load weights from the stream, sample with our noise
"""
