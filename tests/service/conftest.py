"""Clients of Tinker's SDK outlive their tests in a thread that warns of services that have ended."""

from __future__ import annotations

import logging

logging.getLogger("tinker").propagate = False  # another test may read the log
logging.getLogger("tinker").addHandler(logging.NullHandler())
