"""The manifest says what it was given, always in the same bytes; files are hashed in leaves."""

import dataclasses

import numpy as np
from blake3 import blake3

from verl.checkpoint.core.filesystem import FileSystem, write_file
from verl.checkpoint.core.hashing import BLOCK_BYTES, LEAF_BYTES, Leaf, hash_buffers
from verl.checkpoint.core.manifest import FileEntry, LogicalTensor, Manifest, SavedSlice, commit_line, content_digest

ENTRY = FileEntry.of("actor/model.safetensors", hash_buffers([b"header", b"weights"]), linked_from="global_step_1")
STATE = FileEntry.of("trainer_state.json", hash_buffers([b"{}"]))
PART = SavedSlice(file=ENTRY.path, key="ü", offset=6, start=(0,), extent=(7,))
TENSOR = LogicalTensor(component="actor", name="ü", dtype="U8", shape=(7,), slices=(PART,))
MANIFEST = Manifest(
    sequence=3, step=100, tag=None, run_id="r", saved_at="2026-01-01T00:00:00Z", verl_version="0.3.1",
    metrics={"reward/mean": 0.5}, files=(ENTRY, STATE), tensors=(TENSOR,),
)  # fmt: skip


def test_a_manifest_reads_back_as_it_was_written():
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert Manifest.from_bytes(MANIFEST.to_bytes()).to_bytes() == MANIFEST.to_bytes()


def test_the_checksum_of_the_content_changes_with_the_content_alone():
    def digest(*files: FileEntry, tensor: LogicalTensor = TENSOR) -> str:
        return content_digest(dataclasses.replace(MANIFEST, files=files, tensors=(tensor,)))

    assert digest(ENTRY) == digest(ENTRY, STATE) == digest(dataclasses.replace(ENTRY, linked_from=None))
    other = FileEntry.of(ENTRY.path, hash_buffers([b"header", b"weightz"]))
    assert digest(ENTRY) != digest(other)
    assert digest(ENTRY) != digest(ENTRY, tensor=dataclasses.replace(TENSOR, dtype="I8"))


def test_commit_names_the_digest_as_the_usual_tool_prints_it():
    assert commit_line(b"data") == f"{blake3(b'data').hexdigest()}  manifest.json\n".encode()


def test_leaves_end_where_buffers_end_and_after_sixteen_mebibytes(tmp_path):
    big = np.random.default_rng(0).integers(0, 255, LEAF_BYTES + BLOCK_BYTES + 5, dtype=np.uint8)
    buffers = [b"head", b"", big, np.float32(1)]
    leaves = write_file(FileSystem(), tmp_path / "file", buffers)
    assert [leaf.size for leaf in leaves] == [4, LEAF_BYTES, BLOCK_BYTES + 5, 4]
    data = (tmp_path / "file").read_bytes()
    assert leaves[1] == Leaf(LEAF_BYTES, blake3(data[4 : 4 + LEAF_BYTES]).hexdigest())
    assert hash_buffers(buffers) == leaves
    assert data == b"head" + big.tobytes() + np.float32(1).tobytes()
