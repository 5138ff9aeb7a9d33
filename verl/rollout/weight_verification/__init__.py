"""Verifies after every weight sync that the rollout engine holds the trainer's weights.

compare        Comparison of trainer and engine fingerprints: which tensors differ, by how much
fingerprint    Fingerprints of weights: products of each matrix with a few probe vectors
logprob_probe  Log-probs of a few fixed rows on both sides of a sync
verifier       Weight verification after every sync
vllm_params    Fingerprints of a vLLM model's parameters, taken through its layers
vllm_probe     The engine's side of weight verification: runs in the vLLM process
"""
