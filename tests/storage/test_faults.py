"""A server that fails, stalls, hangs up or answers late: nothing is lost, and nothing is half put."""

import dataclasses
import logging
import resource
from collections.abc import Iterator

import pytest
from cases import exhaustive
from storage.s3_server import BUCKET, Fault, Proxy, Request, after

from verl.errors import ConfigError, ObjectDamaged, StorageError, StorageRefused, StorageUnreachable
from verl.storage import store as store_module
from verl.storage.config import S3Storage, storage_at, storage_from
from verl.storage.store import ObjectStore

LONG = bytes(range(256)) * (11 * 4096)  # 11 MiB: three parts of 5


@pytest.fixture
def storage(proxy: Proxy, request: pytest.FixtureRequest) -> S3Storage:
    return S3Storage(
        bucket=BUCKET,
        prefix=f"faults-{abs(hash(request.node.name))}",
        endpoint_url=proxy.url,
        part_mib=5,
        retries=3,
        backoff_s=0.01,
    )


@pytest.fixture
def store(storage: S3Storage) -> Iterator[ObjectStore]:
    with storage.connect() as one:
        yield one


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500),
        Fault(status=503, body=b"<Error><Code>SlowDown</Code></Error>"),
        Fault(hang_up=True),
        Fault(passed_on=True, hang_up=True),
    ],
    ids=["500", "503", "hangs up", "does it and hangs up"],
)
def test_what_passes_is_asked_again(store: ObjectStore, proxy: Proxy, fault: Fault) -> None:
    proxy.misbehave = after(1, fault, method="PUT", times=2)
    store.put("one", b"hello")
    proxy.misbehave = after(1, fault, method="GET", times=1)
    assert bytes(store.get("one", 0, 5)) == b"hello"
    assert proxy.count("PUT", "one") == 3
    assert proxy.count("GET", "one") == 2


def test_a_server_that_stalls_is_asked_again(storage: S3Storage, proxy: Proxy) -> None:
    patient = dataclasses.replace(storage, timeout_s=1.0, retries=20)  # a slow machine may not do it in 1 s either
    stalls = Fault(passed_on=True, delay_s=300.0)
    with patient.connect() as store:
        proxy.misbehave = after(1, stalls, method="PUT", times=2)
        store.put("one", b"hello")
        proxy.misbehave = after(1, stalls, method="GET")
        assert bytes(store.get("one", 0, 5)) == b"hello"
    assert proxy.count("PUT", "one") >= 3
    assert proxy.count("GET", "one") >= 2


def test_a_store_that_is_away_is_said_to_be_after_all_tries(store: ObjectStore, proxy: Proxy) -> None:
    proxy.misbehave = lambda request: Fault(status=503)
    with pytest.raises(StorageUnreachable, match="failed 4 times"):
        store.put("one", b"hello")
    proxy.misbehave = lambda request: None
    assert store.find("one") is None


def test_a_refusal_is_told_at_once(store: ObjectStore, proxy: Proxy) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    proxy.misbehave = lambda request: Fault(status=403, body=denied)
    with pytest.raises(StorageRefused, match="Access Denied"):
        store.put("one", b"hello")
    assert len(proxy.seen) == 1


@pytest.mark.parametrize(
    "fault", [Fault(hang_up=True), *exhaustive(Fault(passed_on=True, hang_up=True), Fault(status=500))]
)
def test_a_part_that_is_lost_is_sent_again_alone(store: ObjectStore, proxy: Proxy, fault: Fault) -> None:
    proxy.misbehave = after(2, fault, method="PUT", part="partNumber")
    store.put("long", LONG)
    proxy.misbehave = lambda request: None
    assert store.get("long") == LONG
    assert proxy.count("PUT", "partNumber") == 4


def test_an_upload_that_fails_is_no_object_and_its_parts_are_given_up(store: ObjectStore, proxy: Proxy) -> None:
    store.put("long", b"what was there before")
    proxy.misbehave = lambda request: Fault(status=500) if "partNumber=2" in request.path else None
    with pytest.raises(StorageUnreachable):
        store.put("long", LONG)
    proxy.misbehave = lambda request: None
    assert bytes(store.get("long")) == b"what was there before"
    assert proxy.count("DELETE", "uploadId=") == 1


def test_a_create_whose_answer_is_lost_finds_its_own_content(store: ObjectStore, proxy: Proxy) -> None:
    proxy.misbehave = after(1, Fault(passed_on=True, hang_up=True), method="PUT")
    assert store.create("once", b"mine")
    proxy.misbehave = after(1, Fault(passed_on=True, hang_up=True), method="PUT")
    assert not store.create("once", b"theirs")
    assert bytes(store.get("once")) == b"mine"


def test_two_creates_at_once_of_which_none_succeeded_are_repeated(store: ObjectStore, proxy: Proxy) -> None:
    conflict = Fault(status=409, body=b"<Error><Code>ConditionalRequestConflict</Code></Error>")
    proxy.misbehave = after(1, conflict, method="PUT")
    assert store.create("once", b"mine")
    assert bytes(store.get("once")) == b"mine"


def test_closing_ends_the_waiting_of_others(proxy: Proxy) -> None:
    proxy.misbehave = lambda request: Fault(status=503)
    store = S3Storage(bucket=BUCKET, endpoint_url=proxy.url, retries=50, backoff_s=30.0).connect()
    store.retry.close()
    with pytest.raises(StorageUnreachable, match="failed 1 times"):
        store.put("one", b"hello")


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_no_key_is_in_what_is_logged_or_raised(
    store: ObjectStore, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    signed: list[str] = []

    def refuse(request: Request) -> Fault:
        signed.append(request.headers["authorization"])
        told = "<Error><Code>SignatureDoesNotMatch</Code><Message>key testing-secret-0123456789</Message></Error>"
        return Fault(status=403, body=told.encode())

    proxy.misbehave = refuse
    with caplog.at_level(logging.DEBUG, "verl"), pytest.raises(StorageRefused) as caught:
        store.put("one", b"hello")
    assert "testing-key-id" in signed[0], "credentials of the environment were used"
    for text in (str(caught.value), caplog.text, repr(store), repr(store.storage)):
        assert "testing-secret" not in text
        assert "testing-key-id" not in text


@pytest.mark.parametrize("key", ["key", "secret", "token", "access_key_id", "secret_access_key"])
def test_a_key_in_the_configuration_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is not a setting of s3") as caught:
        storage_from({"type": "s3", "bucket": "models", key: "AKIA0123456789ABCDEF"})
    assert "AKIA" not in str(caught.value)


def test_an_address_is_a_storage() -> None:
    like = S3Storage(bucket="models", endpoint_url="http://localhost:9000", retries=2)
    found = storage_at("s3://other/runs/one/", like)
    assert found == dataclasses.replace(like, bucket="other", prefix="runs/one")
    assert storage_at("file:///tmp/verl-not-there").address == "file:///tmp/verl-not-there"
    assert storage_at("file:///tmp/runs#1/a?b c").address == "file:///tmp/runs#1/a?b c"  # and nowhere above
    for wrong in (
        "ftp://a/b",
        "file://tmp/a",
        "file://~/a",
        "s3://bucket/a#b",
        "s3://key:secret@bucket/a",
        "s3://bucket/a?token=1",
    ):
        with pytest.raises(ConfigError, match="is not an address of a storage") as caught:
            storage_at(wrong)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("size", ["x", "", "-1", "1.5"])
def test_an_answer_that_is_not_one_of_s3_is_told(size, store: ObjectStore, proxy: Proxy) -> None:
    entry = f"<Key>a</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>{size}</Size>"
    listed = f"<ListBucketResult><Contents>{entry}</Contents></ListBucketResult>"
    proxy.misbehave = lambda request: Fault(status=200, body=listed.encode())
    with pytest.raises(ObjectDamaged, match=f"one of s3.*{size}"):
        store.list("")
    assert len(proxy.seen) == 1


def test_an_object_that_is_longer_than_what_was_asked_for_is_read_no_further(store: ObjectStore, proxy: Proxy) -> None:
    store.put("one", b"hello")
    long = Fault(status=200, body=bytes(300 * 2**20))
    proxy.misbehave = after(1, long, method="GET", times=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ObjectDamaged):
        store.get("one", 0, 5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10
    assert proxy.count("GET") == 1


def test_a_long_object_of_which_the_store_keeps_less_is_not_put(store: ObjectStore, proxy: Proxy) -> None:
    def shorter(request: Request) -> Fault | None:
        return Fault(status=200, size=5) if request.method == "HEAD" else None

    proxy.misbehave = shorter
    with pytest.raises(StorageUnreachable):
        store.put("long", LONG)


def test_a_listing_without_end_is_an_error(store: ObjectStore, proxy: Proxy) -> None:
    store.put("one", b"hello")
    page = (  # the same page again and again
        b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>"
        b"<Contents><Key>one</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>5</Size></Contents>"
        b"</ListBucketResult>"
    )
    proxy.misbehave = after(1, Fault(status=200, body=page), method="GET", times=9)
    with pytest.raises(StorageError, match="listing has no end"):
        store.list()


def test_a_listing_of_ever_new_objects_is_an_error(store: ObjectStore, proxy: Proxy, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "LISTING_BYTES", 2**20)

    def page(request: Request) -> Fault:
        number = len(proxy.seen)
        items = "".join(
            f"<Contents><Key>{store.storage.prefix}/{number}-{i}</Key>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
            for i in range(1000)
        )
        end = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{number}</NextContinuationToken>"
        return Fault(status=200, body=f"<ListBucketResult>{items}{end}</ListBucketResult>".encode())

    proxy.misbehave = page
    with pytest.raises(ObjectDamaged, match=f"{store.storage.prefix}.*no end"):
        store.list()
    assert len(proxy.seen) < 12
