"""Proves after a weight sync that an engine holds the trainer's weights; uses torch and numpy, so it can be lifted out.

fingerprints    Fingerprints of tensors on both sides of a sync
probe           A few fixed rows, whose log-probs are compared too
verifier        Weight verification after every sync: request, reply of the engine, comparison
"""

from verl.rollout.proof.fingerprints import ProbeVectors, WeightFingerprint, fingerprint, join_parts
from verl.rollout.proof.probe import probe_rows
from verl.rollout.proof.verifier import SyncVerifier, VerifyReply, VerifyRequest

__all__ = [
    "ProbeVectors",
    "SyncVerifier",
    "VerifyReply",
    "VerifyRequest",
    "WeightFingerprint",
    "fingerprint",
    "join_parts",
    "probe_rows",
]
