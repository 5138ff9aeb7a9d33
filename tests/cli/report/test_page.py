"""The page in a real browser: it draws, filters, is used by keyboard, loads nothing, and shows text as text."""

import base64
import hashlib
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.report.run_files import HOSTILE, add_lineage, evals, metrics, run_directory, token_row, write_lines
from typer.testing import CliRunner

from verl.cli.main import app
from verl.cli.report.page import render, report
from verl.cli.report.tracker import Report
from verl.component import BuildContext
from verl.tracking.base import Trackers

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")
in_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome")


def content_of(html: str) -> dict[str, Any]:
    return json.loads(html.split('type="application/json">')[1].split("</script>")[0])


def dom(
    html: str, directory: Path, view: str = "", script: str = "", width: int = 1280, flags: tuple[str, ...] = ()
) -> str:
    """The page after its script has run and then `script`, as a browser has it; it has reported no error."""
    assert BROWSER is not None
    file = directory / "page.html"
    if script:  # beside the script of the page, whose hash its policy names
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        html = html.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
        html = html.replace("</body>", f"<script>{script}</script></body>")
    file.write_text(html, encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},900",
        f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=3000", "--enable-logging=stderr", *flags,
        "--dump-dom", f"file://{file}#{view}",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    faults = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert faults == []
    return done.stdout


def sample(source: str, step: int, prompt: str, response: str, score: float | None = None, **others) -> dict:
    return {"source": source, "step": step, "prompt": prompt, "response": response, "score": score, "others": others}


def shown(dumped: str) -> list[list[str]]:
    body = dumped.split('<table id="samples">')[1].split("<tbody>")[1].split("</tbody>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in body.split("<tr>")[1:]]
    return [[re.sub(r"</?button[^>]*>", "", cell) for cell in row] for row in cells]


def test_the_page_runs_its_own_script_and_loads_nothing(tmp_path):
    for text in (render({"samples": [sample("eval", 1, "<script>", "x")]}, "title"), report([run_directory(tmp_path)])):
        (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
        assert policy.startswith("default-src 'none'; ")
        assert "connect-src" not in policy
        for tag in ("script", "style"):
            (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
            assert "http" not in content
            assert len(content.encode()) < 60_000


def test_a_page_takes_scores_that_json_does_not_know():
    html = render({"samples": [sample("eval", 1, "p", "r", float("nan"), raw=float("-inf"))]}, "run")
    (row,) = content_of(html)["samples"]
    assert (row["score"], row["others"]) == ("nan", {"raw": "-inf"})


@in_browser
def test_samples_are_sorted_and_filtered_in_a_browser_and_responses_are_text(tmp_path):
    samples = [sample("train", n, f"p{n % 2}", f"r{n}", n / 10, size=10 - n) for n in range(9)]
    html = render({"samples": [*samples, sample("eval", 9, HOSTILE, HOSTILE)]}, "run & more\n")
    whole = dom(html, tmp_path)
    assert [row[0] for row in shown(whole)] == [str(step) for step in range(10)]
    assert "<h1>run &amp; more\\n</h1>" in whole
    assert shown(whole)[9][4].startswith("&lt;/script&gt;&lt;b id=x&gt;&amp;amp;\\u2028")
    assert "\\u202eabc\\u202c\\u001b[31m" in shown(whole)[9][4]
    best = dom(html, tmp_path, "sort=-score&score_min=0.3&prompt=p0")
    assert [row[4] for row in shown(best)] == ["r8", "r6", "r4"]
    assert "3 of 10 rows, mean reward 0.6000" in best
    falling = dom(html, tmp_path, "sort=-score")
    assert [row[0] for row in shown(falling)] == [*map(str, range(8, -1, -1)), "9"]
    clicked = dom(html, tmp_path, script="""document.querySelector('th[data-key="others.size"] button').click()""")
    assert [row[5] for row in shown(clicked)] == [*map(str, range(2, 11)), ""]
    one = dom(html, tmp_path, script="document.querySelectorAll('td.prompt button')[1].click()")
    assert [row[3] for row in shown(one)] == ["p1"] * 4
    assert [row[4] for row in shown(one)][:2] == ["r1", "<del>r1</del><ins>r3</ins>"]


@in_browser
def test_pictures_of_a_prompt_are_shown_with_it(tmp_path):
    picture = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
    whole = dom(render({"samples": [sample("eval", 1, "p", "r", 1.0, pictures=[picture])]}, "run"), tmp_path)
    assert f'<img src="{picture}"' in whole
    assert shown(whole)[0][5:] == []  # they are no column


@in_browser
def test_the_page_of_a_run_has_every_section_and_is_used_by_keyboard(tmp_path):
    directory = run_directory(tmp_path / "run")
    (directory / "plan.json").write_text(
        json.dumps({"peak": {"bytes": 2**28}, "phases": [{"name": "generate", "bytes": 2**27}]})
    )
    (directory / "anomalies/step_7_actor").mkdir(parents=True)
    (directory / "anomalies/step_7_actor/README.md").write_text("A loss was nan.")
    add_lineage(tmp_path / "checkpoints", "a", directory, None, "finished")
    keys = """
      redraw(true);
      const key = (node, key) =>
        node.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
      const chart = document.querySelector("canvas[aria-label^=reward]");
      key(chart, "ArrowRight"); key(chart, "ArrowRight");
      redraw(true);  // the focus of a token may scroll the chart away before the next frame
      const token = document.querySelector(".tokens span");
      token.focus(); key(token, "ArrowRight");
      document.querySelector("button[aria-label^='8 prompts']").click();
    """
    dumped = dom(report([directory]), tmp_path, script=keys)
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", dumped) == [
        "Run", "Diagnosis", "Curves", "Time and memory", "Prompts", "Tokens", "Samples", "Anomalies", "Lineage",
    ]  # fmt: skip
    assert "Finished after 30 of 30 steps" in dumped
    labels = re.findall(r'<canvas[^>]*aria-label="([^"]*)"', dumped)
    assert any(label.startswith("reward, by step at step 2: reward/mean ") for label in labels)
    assert len(labels) == len(re.findall("<canvas", dumped))
    assert re.search(r'<output[^>]*>token 1 " answer": log-prob -0.11, gap of log-probs -0.01, entropy 0.2', dumped)
    assert "8 of 20 prompts pass more often at step 30 than at step 0, 0 less often, 4 never passed" in dumped
    assert "A loss was nan." in dumped
    for kind in ("input", "select"):  # each has a name for a screen reader
        assert all("<label" in before[-200:] for before in dumped.split(f"<{kind} ")[:-1])


@in_browser
def test_hostile_names_and_long_lines_stay_text_and_secrets_stay_out(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "sk-0123456789abcdef")
    rows = [{**row, "a\n<img src=x onerror=alert(1)>/\u202ekey": 1.0} for row in metrics(1, 4)]
    directory = run_directory(tmp_path / "run", rows, note=HOSTILE)
    (directory / "start.json").write_text(
        json.dumps({"name": f"{HOSTILE}\n", "differences": {HOSTILE: [HOSTILE, "sk-0123456789abcdef"]}})
    )
    long = {"table": HOSTILE, "prompt_text": HOSTILE, "response_text": "z" * 2**20, HOSTILE: HOSTILE}
    write_lines(directory / "samples/step_1.jsonl", [long, {"episode": {"turns": [3]}, "response_text": "damaged"}])
    write_lines(
        directory / "tokens/step_1.jsonl",
        [token_row([HOSTILE, "\n", ""], HOSTILE), {"texts": 3}, {"texts": ["a"], "ids": 3}],
    )
    html = report([directory])
    assert len(html) < 300_000
    assert "sk-0123456789abcdef" not in html
    dumped = dom(html, tmp_path)
    body = dumped.split("<main>")[1].split('<script id="content"')[0]
    assert "<b id=" not in body
    assert "<img" not in body
    assert "\u202e" not in re.sub(r'(value|data-key)="[^"]*"', "", body)  # what nobody sees
    assert f"{2**20 - 20_000} more characters" in body


@in_browser
def test_several_runs_are_compared_with_bands_over_seeds_and_honest_intervals(tmp_path):
    runs = [run_directory(tmp_path / f"a{seed}", metrics(1, 30, seed / 100), seed=seed) for seed in range(3)]
    runs.append(run_directory(tmp_path / "b", metrics(1, 30, 0.2), group_size=8))
    write_lines(runs[3] / "evals/step_30.jsonl", evals(30, 20))
    html = report(runs)
    comparison = content_of(html)["comparison"]
    assert [group["runs"] for group in comparison["groups"]] == [[0, 1, 2], [3]]
    assert comparison["settings"]["trainer.group_size"] == ["", "", "", 8]
    seeds, alone, paired = comparison["statistics"]
    assert (seeds["interval"][3], alone["interval"], alone["why"]) == (3, None, "none: 1 seeds, at least 3 are needed")
    assert paired["mean"] == pytest.approx(0.2)
    assert paired["interval"][1] > 0
    assert "20 prompts of step 30" in paired["why"]
    dumped = dom(html, tmp_path)
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", dumped) == ["Runs", "Settings that differ", "Statistics", "Curves"]
    result = CliRunner().invoke(app, ["report", *map(str, runs), "--html", str(tmp_path / "all.html")])
    assert (result.exit_code, (tmp_path / "all.html").is_file()) == (0, True)
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert (refused.exit_code, "no such directory" in refused.output) == (2, True)


@in_browser
def test_a_sweep_of_nine_is_compared_over_the_differences_of_equal_seeds(tmp_path):
    jobs = itertools.product((0.1, 0.2, 0.3), range(3))
    runs = [
        run_directory(tmp_path / f"sweep/{job}", metrics(1, 30, lr + seed / 100), seed=seed, lr=lr)
        for job, (lr, seed) in enumerate(jobs)
    ]
    html = report(runs)
    comparison = content_of(html)["comparison"]
    assert [group["runs"] for group in comparison["groups"]] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    differences = comparison["statistics"][3:]
    assert [line["mean"] for line in differences] == pytest.approx([0.1, 0.2], abs=1e-6)
    assert all(line["interval"][2] - line["interval"][1] < 1e-6 for line in differences)  # the seeds' spread cancels
    assert {line["why"] for line in differences} == {"Student's t over the differences of 3 seeds"}
    text = re.sub(r"<[^>]+>", " ", dom(html, tmp_path).split("<main>")[1].split('<script id="content"')[0])
    assert f"Directories are below {tmp_path}/sweep/" in text
    assert re.search(r"run 9\s+8\s", text)


def test_groups_are_called_by_the_overrides_that_differ(tmp_path):
    runs = []
    for experiment, seed in (("one", 0), ("one", 1), ("two", 0)):
        runs.append(run_directory(tmp_path / f"{experiment}{seed}", seed=seed, lr={"one": 1, "two": 2}[experiment]))
        overrides = [f"experiment={experiment}", f"++trainer.seed={seed}", "trainer.total_steps=30"]
        (runs[-1] / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    groups = content_of(report(runs))["comparison"]["groups"]
    assert [(group["name"], group["runs"]) for group in groups] == [("experiment=one", [0, 1]), ("experiment=two", [2])]


@in_browser
def test_a_run_of_100000_steps_gives_a_page_that_draws_a_few_thousand_points(tmp_path):
    rows = [
        {"step": step, "time_s": step / 9, "reward/mean": step % 97, "timing/gen_s": 0.1} for step in range(1, 100_001)
    ]
    html = report([run_directory(tmp_path / "run", rows)])
    script = (
        "const pen = CanvasRenderingContext2D.prototype, to = pen.lineTo; let drawn = 0; "
        "pen.lineTo = function (...at) { drawn += 1; return to.apply(this, at); }; "
        "redraw(true); document.title = `drawn ${drawn}`"
    )
    (drawn,) = re.findall(r"<title>drawn (\d+)</title>", dom(html, tmp_path, script=script))
    assert 500 < int(drawn) < 20_000
    assert (
        100_000
        < sum(len(curve["values"]) * 3 / 16 for curve in content_of(html)["runs"][0]["series"].values())
        < 450_000
    )


def test_the_tracker_writes_the_page_when_the_run_ends_and_when_it_fails(tmp_path):
    for status in ("finished", "failed"):
        directory = run_directory(tmp_path / status)
        (directory / "summary.json").unlink()
        running = Trackers(report=Report()).build(BuildContext())
        running.start("project/run", {}, directory, 30)
        running.close(status)
        html = (directory / "report.html").read_text()
        assert len(html) < 300_000
        assert content_of(html)["runs"][0]["status"] == status
    (tmp_path / "nothing").mkdir()
    running = Trackers(report=Report()).build(BuildContext())
    running.start("project/run", {}, tmp_path / "nothing", 30)
    running.close("failed")
    assert not (tmp_path / "nothing/report.html").exists()


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_computing_half_of_the_script_passes_its_own_tests():
    assert NODE is not None
    test = Path(__file__).with_name("page.test.js")
    done = subprocess.run([NODE, "--test", str(test)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
