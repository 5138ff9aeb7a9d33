"""An endpoint that listens during a test, and chat completions from it."""

import contextlib
import threading


@contextlib.contextmanager
def listening(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        server.endpoint.close()
        thread.join(10)


def asked(client, messages, **values):
    return client.chat.completions.create(model="policy", messages=messages, **values)
