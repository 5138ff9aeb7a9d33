"""Files written past the page cache, where the file system can, and all the same where it cannot."""

import errno
import os

import pytest
from faults.disks import RefusingDisk
from faults.scenarios import page_aligned_view, save_images, version_of

from verl.checkpoint.commit.rank_writer import PAGE_BYTES, FileImage, ImageSource, page_aligned, write_direct
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem

CONTENT = os.urandom(3 * PAGE_BYTES + 5)
IMAGE = FileImage(path="file", begin=PAGE_BYTES, sizes=(5, 0, len(CONTENT) - 5))
MEMORY = bytes(PAGE_BYTES) + CONTENT + bytes(page_aligned(len(CONTENT)) - len(CONTENT))


class ShortDirectDisk(FileSystem):
    """Takes no more than some bytes of a write."""

    most = 2 * PAGE_BYTES + 7

    def write_at(self, handle, data, offset):
        return min(super().write_at(handle, data[: page_aligned(self.most)], offset), self.most)


class StuckDisk(ShortDirectDisk):
    """Takes less than a page."""

    most = 7


def test_a_file_ends_where_its_content_ends(tmp_path):
    assert write_direct(FileSystem(), tmp_path / "file", IMAGE, page_aligned_view(MEMORY))
    assert b"".join(IMAGE.buffers(ImageSource(memoryview(MEMORY)))) == CONTENT
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_short_write_is_continued_at_a_boundary_of_pages(tmp_path):
    assert write_direct(ShortDirectDisk(), tmp_path / "file", IMAGE, page_aligned_view(MEMORY))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_disk_that_takes_less_than_a_page_is_given_up(tmp_path):
    with pytest.raises(OSError, match="took 7 bytes"):
        write_direct(StuckDisk(), tmp_path / "file", IMAGE, page_aligned_view(MEMORY))


@pytest.mark.parametrize("refused", ["create_direct", "write_at"])
def test_where_the_page_cache_cannot_be_avoided_it_is_used(tmp_path, refused):
    store = CheckpointStore(tmp_path / "checkpoints", disk=RefusingDisk(**{refused: errno.EINVAL}))
    for step in (1, 2):
        with store.begin(step) as transaction:
            transaction.main.write("reference_model/frozen.bin", [bytes(range(200))])
            transaction.commit()
    assert version_of(save_images(store, 300, 3)) == 3
