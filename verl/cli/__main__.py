"""`python -m verl.cli` is the console command `verl`."""

from __future__ import annotations

from verl.cli.main import run

run()
