"""An actor that samples from a server on loopback, which speaks as vLLM does."""

from contextlib import ExitStack

import pytest
from http_client.servers import serving
from roles import start_actor
from rollout.speaking import Speaker

from verl.rollout.server.config import ServerRollout


@pytest.fixture
def speaker(dir32):
    return Speaker(dir32)


@pytest.fixture
def attached(model32):
    """Start an actor that samples from a server; both are closed after the test."""
    with ExitStack() as ending:

        def start(speaker, post=None, page=None, actor=None, served=None, **options):
            server = ending.enter_context(serving(post or speaker.post, page or speaker.page))
            settings = {"max_new_tokens": 6, "model": served, **options}
            made = start_actor(model32, ServerRollout(endpoint=server.endpoint(), **settings), **(actor or {}))
            ending.callback(made.close)
            made.server = server
            return made

        yield start
