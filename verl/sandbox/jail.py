"""Jails on this machine, made by bubblewrap: one for each program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verl.component import BuildContext, component
from verl.errors import ConfigError
from verl.sandbox.jail_command import ELSE, JailCommand, JailSettings
from verl.sandbox.jail_pool import JailPool


@component
class Jail(JailSettings):
    """Runs each program in a new bubblewrap jail; some jails are started in advance."""

    def machine_faults(self) -> Iterator[str]:
        try:
            with replace(self, pool_size=1).build(BuildContext()) as pool:
                result = pool.run("print(6 * 7)")
        except ConfigError as error:
            yield from error.faults
            return
        if result.stdout != "42\n":
            printed = result.detail or result.stderr or result.outcome
            yield f"_target_ is Jail: a test program in a jail returned {printed!r} in place of 42. {ELSE}"

    def build(self, context: BuildContext) -> JailPool:
        """Raises ConfigError where this machine cannot make a jail."""
        return JailPool(self, JailCommand.find(self))
