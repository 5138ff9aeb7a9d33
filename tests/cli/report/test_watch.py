"""`verl watch`: lines of a running run as they are written, and its page, which grows and is for this machine alone."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.report.run_files import metrics, run_directory
from cli.report.test_page import BROWSER, in_browser
from typer.testing import CliRunner

from verl.checkpoint.ownership import Owner, RunLock
from verl.cli.main import app
from verl.cli.report.watch import RunServer


def add_lines(directory: Path, rows: list[dict], end: str = "") -> None:
    with open(directory / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + end)


def held(directory: Path) -> RunLock:
    lock = RunLock(directory, Owner.here(), "DIR")
    assert lock.acquire() is None
    return lock


@pytest.fixture
def served(tmp_path) -> Iterator[RunServer]:
    with RunServer(run_directory(tmp_path / "run")) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(url: str, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, method=method, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_a_run_that_has_ended_is_shown_from_its_last_lines_on(tmp_path):
    result = CliRunner().invoke(app, ["watch", str(run_directory(tmp_path / "run"))])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "run verl/small, 30 steps"
    assert any(line.startswith("step 30/30  reward ") for line in lines)
    assert not any(line.startswith("step 2/30 ") for line in lines)
    assert any(line.startswith("eval 30/30") for line in lines)
    assert lines[-1].startswith("Finished after 30 of 30 steps")


def test_the_lines_of_a_running_run_are_shown_once_each_as_they_come_until_it_ends(tmp_path):
    rows = metrics(1, 6)
    directory = run_directory(tmp_path / "run", rows=rows[:4])
    lock = held(directory)
    command = [sys.executable, "-m", "verl.cli", "watch", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        shown: list[str] = []
        reader = threading.Thread(target=lambda: shown.extend(watching.stdout))
        reader.start()
        half = json.dumps(rows[4])
        wait_for(lambda: any("step 3/30" in line for line in shown))
        add_lines(directory, [], end=half[:20])
        time.sleep(1.5)  # more than one look at the file
        add_lines(directory, [], end=half[20:] + "\n")
        wait_for(lambda: any("step 4/30" in line for line in shown))
        add_lines(directory, rows[5:])
        lock.release()
        assert watching.wait(120) == 0
        reader.join()
    steps = [int(match[1]) for line in shown if (match := re.match(r"step (\d+)/30", line))]
    assert steps == [1, 2, 3, 4, 5, 6]


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("web", [[], ["--web"]])
def test_what_is_no_run_is_refused(tmp_path, web):
    result = CliRunner().invoke(app, ["watch", str(tmp_path), *web])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "has neither metrics.jsonl nor config.yaml" in result.output


def test_a_port_that_is_in_use_is_named(served):
    result = CliRunner().invoke(app, ["watch", str(served.run_dir), "--web", "--port", str(served.port)])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert f"--port is {served.port}: Address already in use. Give another one" in result.output


def test_the_page_is_for_who_has_its_address_on_this_machine_and_changes_nothing(served):
    status, headers, body = ask(served.url)
    assert status == 200
    assert b"connect-src 'self'" in body
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert served.server_address[0] == "127.0.0.1"
    assert ask(served.url, host=f"localhost:{served.port}")[0] == 200
    assert ask(served.url, host="rebound.example")[0] == 403
    assert ask(served.url, host=f"rebound.example:{served.port}")[0] == 403
    root = f"http://127.0.0.1:{served.port}"
    for address in (
        f"{root}/",
        f"{root}/wrong/",
        f"{root}/wrong/metrics",
        f"{served.url}config.yaml",
        f"{served.url}../",
    ):
        assert ask(address)[0] == 404, address
    for method in ("POST", "PUT", "DELETE"):
        assert ask(served.url, method=method)[0] == 501, method


def test_the_command_prints_an_address_that_can_be_opened(tmp_path):
    command = [sys.executable, "-m", "verl.cli", "watch", "--web", str(run_directory(tmp_path / "run"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        status, _, body = ask(serving.stdout.readline().strip())
        assert (status, b"verl/small" in body) == (200, True)
        serving.send_signal(signal.SIGINT)
        assert (serving.wait(120), serving.stderr.read() if serving.stderr else "") == (0, "")


def test_new_lines_are_sent_whole_from_the_asked_byte_on(served):
    before = (served.run_dir / "metrics.jsonl").stat().st_size
    row = metrics(31, 31)[0]
    add_lines(served.run_dir, [row], end='{"step": 32, "rew')
    status, headers, body = ask(f"{served.url}metrics?offset={before}")
    assert (status, json.loads(body)) == (200, row)
    assert headers["X-Run-Status"] == "finished"
    assert ask(f"{served.url}metrics?offset={before + len(body)}")[2] == b""
    lock = held(served.run_dir)
    assert ask(f"{served.url}metrics?offset={before}")[1]["X-Run-Status"] == "running"
    lock.release()
    for offset in ("-1", "x", "9" * 30, "9" * 5000, "²"):
        assert ask(f"{served.url}metrics?offset={urllib.parse.quote(offset)}")[0] == 200, offset


def test_a_run_that_was_moved_and_files_that_cannot_be_shown_are_answered(served, capfd):
    (served.run_dir / "config.yaml").unlink()
    (served.run_dir / "metrics.jsonl").unlink()
    assert ask(served.url)[0] == 404
    served.run_dir.rename(served.run_dir.with_name("moved"))
    for address in (served.url, f"{served.url}metrics?offset=0"):
        assert ask(address)[0] == 410
    assert capfd.readouterr() == ("", "")


@in_browser
def test_the_page_draws_lines_that_come_after_it(served, tmp_path):
    assert BROWSER is not None
    page = served.page
    coming = iter([metrics(31, 33, lift=0.2)[:2]])

    def page_and_then_lines() -> bytes:
        text = page()
        for rows in coming:
            add_lines(served.run_dir, rows)
        return text

    served.page = page_and_then_lines
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,3000",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--enable-logging=stderr",
        "--dump-dom", served.url,
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    labels = re.findall(r'<canvas[^>]*aria-label="([^"]*)"', done.stdout)
    expected = f"reward, by step, last values: reward/mean {metrics(32, 32, lift=0.2)[0]['reward/mean']:.4g}"
    assert expected in labels
