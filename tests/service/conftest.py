"""Clients of Tinker's SDK outlive their tests in a thread that warns of services that have ended."""

from __future__ import annotations

import logging

# another test may read the log
logging.getLogger("tinker.lib.internal_client_holder").addFilter(lambda record: "heartbeat" not in record.msg)
