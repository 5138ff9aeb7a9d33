"""Runs an agent program for each episode: a user's function, or a command. Standard library only."""

import inspect
import json
import os
import subprocess

import __main__

KEY = "none"  # required by the clients
ERROR_CHARS = 400  # maximum characters of a failed program's output in a message


class ProgramEpisode:
    def __init__(self, path=None, command=(), timeout_s=600.0):
        self.function = __main__.located(path) if path else None
        self.command, self.timeout_s = list(command), timeout_s
        self.process = None

    def reset(self, row, seed):
        base_url = row.pop("base_url")
        if self.function is None:
            return self.run(row, base_url)
        result = self.function(row, base_url)
        return awaited(result) if inspect.isawaitable(result) else as_text(result)

    def run(self, row, base_url):
        variables = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY}
        variables |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": KEY}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self.command, stdin=pipe, stdout=pipe, stderr=pipe, env=variables, errors="replace"
        )
        try:
            out, errors = self.process.communicate(json.dumps(row), timeout=self.timeout_s)
        finally:
            self.process.kill()
        if self.process.returncode:
            raise RuntimeError(f"it ended with {self.process.returncode}: {errors.strip()[-ERROR_CHARS:]}")
        if not (lines := out.strip().splitlines()):
            return None
        try:
            return as_text(float(lines[-1]))
        except ValueError:
            raise __main__.BadAnswer(
                f"the last line that the program printed is {lines[-1][:60]!r}: expected a number"
            ) from None

    def step(self, action):
        raise RuntimeError("a program has no steps")

    def close(self):
        if self.process is not None:
            self.process.kill()


async def awaited(found):
    return as_text(await found)


def as_text(found):
    """A reward as text; any number is valid."""
    return None if found is None else repr(__main__.as_reward(found, "the program"))
