"""Which credentials and which address a store is asked with: those of the environment or of the machine, or none."""

import contextlib
import datetime
import os
import signal
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from storage.s3_server import BUCKET, Fault, Proxy, Request

from verl.errors import StorageRefused, StorageUnreachable
from verl.storage.config import GCSStorage, OSSStorage, S3Storage, Storage
from verl.utils.redact import redact


@pytest.fixture
def home(tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without credentials; none are in the environment."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "OSS_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def authorization(storage: Storage, proxy: Proxy) -> str:
    with storage.connect() as store:
        store.put("one", b"1")
    return proxy.seen[-1].headers["authorization"]


def test_what_is_set_wins_over_the_environment(home, proxy, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    said = authorization(S3Storage(bucket=BUCKET, endpoint_url=proxy.url, region="eu-west-3"), proxy)
    assert "of-here/" in said
    assert "/eu-west-3/" in said


def test_credentials_that_are_not_there_are_named(home):
    with pytest.raises(StorageRefused, match="OSS_ACCESS_KEY_ID"):
        OSSStorage(bucket=BUCKET, endpoint_url="http://127.0.0.1:9").connect()


def test_a_machine_that_gives_no_keys_for_a_while_is_asked_again(home, proxy, monkeypatch):
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", proxy.url)
    status = [404]

    def machine(request: Request) -> Fault | None:
        if not request.path.startswith("/latest"):
            return None
        keys = b'{"AccessKeyId":"of-machine","SecretAccessKey":"s","Token":"t","Expiration":"2020-01-01T00:00:00Z"}'
        return Fault(status=status[0], body=keys if request.path.endswith("/lab") else b"lab")

    proxy.misbehave = machine
    with S3Storage(bucket=BUCKET, endpoint_url=proxy.url, retries=1, backoff_s=0.3).connect() as store:
        with pytest.raises(StorageRefused) as refused:
            store.put("one", b"1")
        assert "no credentials. Export AWS_ACCESS_KEY_ID" in redact(str(refused.value)), "the advice is taken for a key"
        status[0] = 200
        store.put("one", b"1")
        status[0] = 404
        time.sleep(0.2)  # obstore asks for keys ten times a second at most
        with pytest.raises(StorageUnreachable, match="failed 2 times"):
            store.put("one", b"1")


def test_a_certificate_that_nobody_vouches_for_is_refused(home, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    key, certificate = home / "key.pem", home / "certificate.pem"
    _sign_own(key, certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with context.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                server.accept()

        threading.Thread(target=accept, daemon=True).start()
        storage = S3Storage(bucket=BUCKET, endpoint_url=f"https://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(StorageRefused, match="AWS_CA_BUNDLE"), storage.connect() as store:
            store.size("one")
    for authorities, said in ((home / "none.pem", "No such file"), (key, "with the certificates of AWS_CA_BUNDLE")):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authorities))
        with pytest.raises(StorageRefused, match=said):
            storage.connect()


def _sign_own(key_file: Path, certificate_file: Path) -> None:
    """Write the key and the certificate of a server that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")]), datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    pem, open_key = serialization.Encoding.PEM, serialization.NoEncryption()
    certificate_file.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    key_file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, open_key))


def test_oss_is_asked_with_its_own_keys_alone(home, proxy, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-s3")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-s3")
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "of-oss")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "secret")
    assert "of-oss/" in authorization(OSSStorage(bucket=BUCKET, endpoint_url=proxy.url), proxy)
    assert "x-amz-security-token" not in proxy.seen[-1].headers


def test_a_login_of_google_that_cannot_be_used_is_refused_at_once(home, monkeypatch):
    (home / "login.json").write_text('{"type": "external_account", "private_key": "not to be shown"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(home / "login.json"))
    with pytest.raises(StorageRefused, match="external_account") as caught:
        GCSStorage(bucket=BUCKET).connect()
    assert "not to be shown" not in str(caught.value)


def test_ctrl_c_ends_the_wait_for_a_store_that_stalls(proxy, monkeypatch):
    def stall(request: Request) -> Fault:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return Fault(passed_on=True, delay_s=1e6)

    monkeypatch.setattr(signal, "SIGINT", signal.SIGUSR1)  # pytest ends at the other
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    proxy.misbehave = stall
    try:
        with (
            S3Storage(bucket=BUCKET, endpoint_url=proxy.url, timeout_s=1e5).connect() as store,
            pytest.raises(KeyboardInterrupt),
        ):
            store.size("one")
    finally:
        signal.signal(signal.SIGUSR1, before)
