"""Finding, verifying and reading checkpoints. Nothing here writes.

discovery     Discovery: which checkpoints of a directory are complete, and which is the newest. Changes nothing
lazy_tensors  Lazy tensors: a component's tensors in torch, mapped from the files, hashed when first read
reader        Reads bytes of a checkpoint's files and tensors, hashed while they are read; verifies checkpoints
"""
