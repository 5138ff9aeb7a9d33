"""Every kind of store keeps the same promises; S3 is a real server on loopback."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cases import exhaustive
from storage.s3_server import BUCKET

from verl.errors import ObjectDamaged, ObjectNotFound, StorageRefused
from verl.storage.config import GCSStorage, LocalStorage, OSSStorage, S3Storage, Storage
from verl.storage.store import ObjectStore

LONG = bytes(range(256)) * (11 * 4096)  # 11 MiB: three parts of 5


@pytest.fixture(params=["local", "s3", "gcs", *exhaustive("s3 without conditions", "oss")])
def store(request: pytest.FixtureRequest, tmp_path: Path):
    prefix = f"{request.node.name.replace('[', '-').replace(']', '').replace(' ', '-')}/here"
    made: dict[str, Storage] = {"local": LocalStorage(path=str(tmp_path / "objects"), prefix=prefix, part_mib=5)}
    if request.param.startswith("s3"):
        url, condition = request.getfixturevalue("s3_url"), "without" not in request.param
        made[request.param] = S3Storage(
            bucket=BUCKET, prefix=prefix, endpoint_url=url, part_mib=5, conditional_put=condition
        )
    for name, kind in (("gcs", GCSStorage), ("oss", OSSStorage)):
        if request.param == name:
            url = request.getfixturevalue(f"{name}_url")
            made[name] = kind(bucket=BUCKET, prefix=prefix, endpoint_url=url, part_mib=5)
    with made[request.param].connect() as connected:
        yield connected


def test_what_is_put_is_got(store: ObjectStore) -> None:
    store.put("a/one", b"hello")
    assert bytes(store.get("a/one")) == b"hello"
    assert bytes(store.get("a/one", 1, 3)) == b"el"
    assert store.size("a/one") == 5
    assert store.read("a/one", 5) == b"hello"
    with pytest.raises(ObjectDamaged):
        store.read("a/one", 4)
    store.put("a/one", b"bye")
    assert bytes(store.get("a/one")) == b"bye"


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert store.size("empty") == 0
    assert bytes(store.get("empty")) == b""
    with pytest.raises(ObjectDamaged):
        store.read("empty", 5)


def test_a_long_object_travels_in_parts_and_is_whole(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LONG)
    assert store.put_file("long", tmp_path / "file") == len(LONG)
    assert store.get("long") == LONG
    assert b"".join(store.pieces("long", 3, len(LONG) - 5)) == LONG[3:-5]


def test_what_breaks_off_is_not_put(store: ObjectStore) -> None:
    def pieces() -> Iterator[bytes]:
        yield LONG[: 5 * 2**20]
        raise ObjectDamaged("not what was written")

    with pytest.raises(ObjectDamaged, match="not what was written"):
        store.put_pieces("refused", pieces, len(LONG))
    assert store.find("refused") is None


def test_a_file_that_is_cut_off_meanwhile_is_not_put(store: ObjectStore) -> None:
    with pytest.raises(ObjectDamaged, match="should have 12 bytes"):
        store.put_pieces("short", lambda: [b"only this"], 12)
    assert store.find("short") is None


def test_one_of_many_creates(store: ObjectStore) -> None:
    if store.storage.kind == "s3" and not store.storage.conditional_put:  # type: ignore[attr-defined]
        pytest.skip("a store without conditions promises this only to those that come one after another")
    names = [f"process {number}" for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        created = list(threads.map(lambda name: store.create("only", name.encode()), names))
    assert sum(created) == 1  # and the others were told so, not failed
    assert bytes(store.get("only")).decode() == names[created.index(True)]


def test_create_leaves_what_is_there(store: ObjectStore) -> None:
    assert store.create("once", b"first")
    assert not store.create("once", b"other")
    assert bytes(store.get("once")) == b"first"
    assert store.create("once", b"first"), "the same content is taken for our own"


def test_listing_gives_keys_and_sizes_in_order(store: ObjectStore) -> None:
    assert store.list("x/") == []
    for key in ("x/b", "x/a/deep", "xy", "z"):
        store.put(key, key.encode())
    assert [(found.key, found.size) for found in store.list("x/")] == [("x/a/deep", 8), ("x/b", 3)]
    assert [found.key for found in store.list("x")] == ["x/a/deep", "x/b", "xy"]


def test_what_is_missing_is_said(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFound):
        store.get("nothing")
    with pytest.raises(ObjectNotFound):
        store.get("nothing", 0, 4)
    with pytest.raises(ObjectNotFound):
        store.size("nothing")
    store.delete("nothing")
    store.put("short", b"1234")
    with pytest.raises(ObjectDamaged):
        store.get("short", 2, 9)


def test_a_bucket_that_is_not_there_is_no_reason_to_ask_again(s3_url: str) -> None:
    with (
        S3Storage(bucket="nobody-made-it", endpoint_url=s3_url).connect() as store,
        pytest.raises(StorageRefused, match="there is no bucket"),
    ):
        store.put("a", b"1")
