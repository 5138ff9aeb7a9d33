"""Checkpoints of the training service that expire."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("tinker", reason="the SDK is not installed: pip install 'verl[serve]'")
pytest.importorskip("uvicorn")

from service.test_http_service import client_of, running

from verl.service import service as module


def test_a_checkpoint_expires_when_its_client_has_said_so(model32, tmp_path, monkeypatch):
    with running(model32, tmp_path) as served:
        client = client_of(served).create_lora_training_client("small", rank=2).result()
        path = client.save_state("kept").result().path
        short = client.save_state("short", ttl_seconds=3600).result().path
        expiries = {x.tinker_path: x.expires_at for x in served[1].checkpoints(client.model_id)}
        assert expiries[path] is None
        expires_at = expiries[short]
        assert expires_at is not None
        assert 3590 < expires_at.timestamp() - time.time() <= 3600
        with pytest.raises(Exception, match="ttl_seconds"):
            client.save_state("at once", ttl_seconds=1).result()
        directory, now = served[1].saved_at(short), time.time()
        monkeypatch.setattr(module.time, "time", lambda: now + 3601)
        with pytest.raises(Exception, match="no such checkpoint"):
            client.load_state(short).result()
        assert [x.tinker_path for x in served[1].checkpoints(client.model_id)] == [path]
        served[1].sweep()
        served[1].jobs.run(int).result()
        assert (directory.exists(), served[1].saved_at(path).exists()) == (False, True)
