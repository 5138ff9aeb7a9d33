"""The documents say what the code does."""

import dataclasses
import re
from pathlib import Path

import pytest
from trainer.runs import GRPO_ALGORITHM, JSONL, PPO_ALGORITHM, fit, ppo_run, read_lines

from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.algorithms.importance_sampling import TruncatedIS
from verl.algorithms.kl import AdaptiveKLInReward
from verl.models.pretrained import Pretrained

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("script", ["make_results_table.py", "make_fault_table.py"])
def test_the_tables_of_the_results_are_up_to_date(script, fork_server, tmp_path):
    done = fork_server.run([ROOT / "scripts" / script, "--check"], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("table", ["fields", "models", "scaling", pytest.param("plans", marks=pytest.mark.exhaustive)])
def test_a_table_of_the_code_is_made(table, fork_server, tmp_path):
    done = fork_server.run([ROOT / "scripts/make_tables.py", table], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n| ") > 10


def documented_keys() -> list[re.Pattern[str]]:
    text = (ROOT / "docs/metrics.md").read_text()
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    keys = [key for cell in cells for key in re.findall(r"`([^`]+/[^`]+)`", cell)]
    return [re.compile(re.sub(r"\\\*|STAGE|NAME|(?<=@)k|(?<=lag_)K", r"[\\w]+", re.escape(key))) for key in keys]


ADAPTIVE = dataclasses.replace(PPO_ALGORITHM, kl=AdaptiveKLInReward(coef=0.1, target=1.0), correction=TruncatedIS())
SELECTING = dataclasses.replace(GRPO_ALGORITHM, selection=DynamicSampling(on_none="skip"), mini_batches=1)


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [(PPO_ALGORITHM, "sync"), (GRPO_ALGORITHM, "sync"), (ADAPTIVE, "async"), (SELECTING, "sync")],
    ids=["ppo", "grpo", "adaptive, corrected and asynchronous", "selecting"],
)
def test_every_metric_of_a_run_is_explained(algorithm, mode, dir32, tmp_path):
    run = ppo_run(Pretrained(path=str(dir32)), algorithm, total_steps=1, tracker=JSONL, mode=mode)
    fit(run, tmp_path)
    logged = {key for line in read_lines(tmp_path / "metrics.jsonl") for key in line} - {"step", "time_s"}
    known = documented_keys()
    assert logged
    assert {key for key in logged if not any(pattern.fullmatch(key) for pattern in known)} == set()


def test_every_path_that_the_documents_name_exists():
    pattern = re.compile(r"`((?:verl|conf|scripts|tests|benchmarks|docs)/[\w/.-]+)`")
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        named = set(pattern.findall(page.read_text()))
        assert {path for path in named if not (ROOT / path).exists()} == set(), page.name


def test_the_readme_is_one_page_whose_ratios_are_those_of_the_results():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines[:30] if len(line) > 80 and not line.startswith("![")] == []
    table = "\n".join(line for line in lines if line.startswith("| "))
    results = (ROOT / "docs/results.md").read_text().partition("<!-- results -->")[2]
    ratios = re.findall(r"[\d.]+x", table)
    assert len(ratios) >= 8
    assert [ratio for ratio in ratios if ratio not in results] == []


def test_every_document_is_in_the_index_and_every_link_leads_somewhere():
    index = (ROOT / "docs/README.md").read_text()
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert [page.name for page in pages if page.name != "README.md" and f"]({page.name})" not in index] == []
    for page in [*pages, *ROOT.glob("*.md")]:
        targets = re.findall(r"\]\(((?!https?:)[^)#\s]+)[^)]*\)", page.read_text())
        assert [target for target in targets if not (page.parent / target).exists()] == [], page.name


def test_the_tour_follows_one_step_through_few_files_and_names_only_what_they_define():
    section = (ROOT / "docs/tour.md").read_text().partition("## One batch\n")[2]
    calls = re.findall(r"^ *(\S+\.py) +(.+)$", section.split("```")[1], re.MULTILINE)
    names = [
        (ROOT / file if file == "main_ppo.py" else ROOT / "verl" / file, names.split(", ")) for file, names in calls
    ]
    files, hops = len({file for file, _ in names}), sum(len(of_file) for _, of_file in names)
    assert f"{files} files, {hops} hops" in section
    assert (files <= 35, hops <= 70) == (True, True)
    for file, of_file in names:
        text = file.read_text()
        for name in (part for dotted in of_file for part in dotted.split(".")):
            assert re.search(rf"\b(def|class) {name}\b|^{name} = ", text, re.MULTILINE), (file, name)
