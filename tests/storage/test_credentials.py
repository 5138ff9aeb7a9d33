"""Which credentials and which address a store is asked with: those of the environment, of a profile, or none."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from storage.s3_server import BUCKET, Fault, Proxy, Request

from verl.errors import StorageRefused
from verl.storage.config import GCSStorage, OSSStorage, S3Storage, Storage

PROFILE = "[profile lab]\nregion = eu-west-1\nendpoint_url = {url}\n"


@pytest.fixture
def home(tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without credentials; none are in the environment."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "OSS_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    (tmp_path / ".aws").mkdir()
    return tmp_path


def authorization(storage: Storage, proxy: Proxy) -> str:
    with storage.connect() as store:
        store.put("one", b"1")
    return proxy.seen[-1].headers["authorization"]


def test_what_is_set_wins_over_the_environment_and_that_over_a_profile(home, proxy, monkeypatch):
    (home / ".aws/config").write_text(PROFILE.format(url=proxy.url))
    (home / ".aws/credentials").write_text("[lab]\naws_access_key_id = of-lab\naws_secret_access_key = secret\n")
    assert "of-lab/" in (said := authorization(S3Storage(bucket=BUCKET), proxy))
    assert "/eu-west-1/" in said
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    said = authorization(S3Storage(bucket=BUCKET, endpoint_url=proxy.url, region="eu-west-3"), proxy)
    assert "of-here/" in said
    assert "/eu-west-3/" in said


def test_credentials_that_are_not_there_are_named(home):
    oss = OSSStorage(bucket=BUCKET, endpoint_url="http://127.0.0.1:9")
    for storage, said in ((S3Storage(bucket=BUCKET), "AWS_PROFILE is 'lab'"), (oss, "OSS_ACCESS_KEY_ID")):
        with pytest.raises(StorageRefused, match=said):
            storage.connect()


@pytest.mark.parametrize("line", ["sso_session = lab", "role_arn = arn:aws:iam::1:role/lab"])
def test_a_profile_that_needs_boto3_is_refused_without_it(line, home, proxy, monkeypatch):
    (home / ".aws/config").write_text(PROFILE.format(url=proxy.url) + line)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StorageRefused, match="boto3"):
        S3Storage(bucket=BUCKET).connect()


def test_a_profile_with_a_command_is_asked_by_boto3(home, proxy):
    (home / "keys.json").write_text('{"Version": 1, "AccessKeyId": "of-command", "SecretAccessKey": "secret"}')
    (home / ".aws/config").write_text(f"{PROFILE.format(url=proxy.url)}credential_process = cat {home}/keys.json")
    assert "of-command/" in authorization(S3Storage(bucket=BUCKET), proxy)


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
