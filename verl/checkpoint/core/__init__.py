"""The format of a checkpoint on disk: files, manifest, digests.

checkpoint          Opening a checkpoint, and which version of verl reads it
filesystem          File-system access of the checkpoint store: every system call behind one interface
hashing             BLAKE3 of files, in leaves: pieces that can be verified without reading the rest
manifest            The manifest of a checkpoint: every file with its digest
safetensors_format  Writing and reading the safetensors format: a header in JSON
"""
