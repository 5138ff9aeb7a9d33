"""Verifies after every weight sync that the rollout engine holds the trainer's weights.

fingerprint     Fingerprints of tensors on both sides of a sync
log_prob_probe  Log-probs of a few fixed rows on both sides of a sync
verifier        Weight verification after every sync: request, reply of the engine, comparison
vllm_params     Fingerprints of a vLLM model's parameters, taken through its layers
"""
