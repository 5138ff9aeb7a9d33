"""DataProto: the batch that roles exchange, and the contract of its fields.

concat         Concatenation of batches: equality, re-padding, and facts that must agree
data_proto     DataProto: the batch that roles exchange
equality       Equality of the values of a batch, and where two of them first differ
fields         The table of batch fields: what each is called, its dims, dtype, unit, meaning
joined_rows    Episodes that several rows are parts of: joined, and divided again
provenance     Provenance: which function produced a field of a batch, and the error that says so
serialization  Serialization of batches: raw buffers for other processes
validation     Validation of batch fields: column types and row indices always; finite values, masks
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.protocol.data_proto import DataProto, pad_to_divisor, unpad

__all__ = ["DataProto", "pad_to_divisor", "unpad"]


def __getattr__(name: str) -> Any:
    """Import what is exported here when it is first asked for: light modules of this package need no torch."""
    if name in __all__:
        from verl.protocol import data_proto

        return getattr(data_proto, name)
    raise AttributeError(f"module 'verl.protocol' has no attribute {name!r}")
