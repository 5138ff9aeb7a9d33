"""What docs/checkpoints.md shows of the commands is what they print."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from golden_run import golden_run
from typer.testing import CliRunner

from verl.cli import checkpoint_compat, main

PAGE = Path(__file__).parents[2] / "docs/checkpoints.md"


def shown(page: str) -> Iterator[tuple[str, str]]:
    """Every command of the page and the output below it."""
    for block in re.findall(r"```console\n(.*?)```", page, flags=re.DOTALL):
        for part in block.split("$ ")[1:] if block.startswith("$ ") else []:
            command, _, output = part.partition("\n")
            yield command, output


def told(command: str) -> str:
    """What a command prints, run in this process if it is ours."""
    alone, _, asks_status = command.partition("; echo ")
    program, *arguments = shlex.split(alone)
    apps = {"verl": main.app, "verl-checkpoint-compat": checkpoint_compat.app}
    if program not in apps:
        return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
    result = CliRunner().invoke(apps[program], arguments)
    return result.output + (f"status {result.exit_code}\n" if asks_status else "")


def lasting(output: str) -> str:
    """Without what is another on another day, at another place or to another version."""
    output = re.sub(r"saved \w+( \w+)? ago", "saved ... ago", output)
    output = re.sub(r"/\S*/(?=checkpoints)", "/home/me/run/", output)
    return re.sub(r"\bv?\d+\.\d+\.\d+\b", "x.y.z", output)


def test_the_page_shows_what_the_commands_print(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    golden_run(Path("checkpoints"))
    commands = list(shown(PAGE.read_text()))
    assert len(commands) >= 5
    for command, output in commands:
        assert lasting(told(command)) == lasting(output), command
