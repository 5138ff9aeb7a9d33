"""DataProto: the batch that roles exchange, and the contract of its fields.

concat         Concatenation of batches: re-padding, facts that must agree, and the equality of fields and facts
data_proto     DataProto: the batch that roles exchange
dispatch       Decorators that declare how a call of a role's method is distributed over the processes of the role
fields         The table of batch fields: name, dims, dtype, unit, meaning, producer and padding
provenance     The function that produced a field of a batch, for errors about it
ragged         Ragged: a field whose rows differ in length, such as the patches of images; rows may share an item
serialization  Serialization of batches: raw buffers for other processes, JSON values, files
user_function  Functions of a user by their path: checks of the source, import, signature
validation     Validation of batch fields: column types and row indices always; finite values, masks
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.protocol.data_proto import DataProto

__all__ = ["DataProto"]


def __getattr__(name: str) -> Any:
    """Import exported names lazily, so that light modules of this package do not import torch."""
    if name in __all__:
        from verl.protocol import data_proto

        return getattr(data_proto, name)
    raise AttributeError(f"module 'verl.protocol' has no attribute {name!r}")
