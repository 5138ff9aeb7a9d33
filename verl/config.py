"""Settings of this process: read from the environment once, and settable as `verl.config.NAME = value`."""

from __future__ import annotations

import os

from verl.errors import ConfigError

_MEANINGS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "": False,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def flag(variable: str) -> bool:
    """The environment variable as true or false; unset means false.

    Raises:
        ConfigError: the variable holds neither, such as `VERL_STRICT_DATA_CHECK=2`.
    """
    text = os.environ.get(variable, "")
    if (value := _MEANINGS.get(text.strip().lower())) is None:
        raise ConfigError(f"{variable} is {text!r}: expected 1 or 0 (true, false, yes, no, on, off are understood).")
    return value


# Check the content (masks, padding, finite values) of every DataProto, not only shapes and dtypes.
strict_data_check: bool = flag("VERL_STRICT_DATA_CHECK")

# Empty the caching allocator of a GPU after generation; see `release_cached`.
auto_cache_clear: bool = flag("VERL_AUTO_CACHE_CLEAR")
