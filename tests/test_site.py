"""The site of the documents builds without a warning, shows what GitHub shows, and needs no other server."""

import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
# of a page that both renderers must agree on
ELEMENTS = ("h1", "h2", "h3", "ul", "ol", "li", "table", "td", "pre", "img", "strong")


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def load(path: str):
    """A module of the repository that is in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Tags(HTMLParser):
    def __init__(self, html: str):
        super().__init__()
        self.count: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += tag in ELEMENTS
        loaded = {"script": "src", "link": "href", "img": "src", "iframe": "src"}.get(tag)
        self.addresses += [value or "" for name, value in attrs if name == loaded]


def pages_of_nav(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages_of_nav(part)]


def test_every_page_and_notebook_is_in_the_navigation_once():
    text = (ROOT / "mkdocs.yml").read_text()
    named = pages_of_nav(yaml.safe_load(re.sub(r"!!python/\S+ \{kwds: \{.*?\}\}", "null", text))["nav"])
    written = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    made = [page for page in named if page.startswith(("api/", "tables/"))]
    reference = yaml.safe_load((ROOT / "docs/site/api.yaml").read_text())
    assert {f"api/{name}.md" for name in ("README", *reference)} == {page for page in made if page.startswith("api/")}
    assert sorted(named) == sorted([*written, *made, *(f"notebooks/{path.stem}.md" for path in NOTEBOOKS)])


def test_links_of_notebooks_lead_somewhere():
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        targets = re.findall(r"\]\(((?!https?:)[^)#\s]+)", text)
        assert [target for target in targets if not (path.parent / target).exists()] == [], path.name


def test_every_exported_name_is_in_the_reference():
    import verl

    pages = yaml.safe_load((ROOT / "docs/site/api.yaml").read_text())
    named = {path.rpartition(".")[2] for page in pages.values() for path in page["names"]}
    assert {name for name in verl.__all__ if not name.startswith("__")} - named == set()


@pytest.mark.skipif(not is_installed("griffe"), reason="needs the extra docs")
def test_an_entry_that_names_two_arguments_becomes_two():
    extension = load("docs/site/griffe_components.py")
    text = "Clip.\n\nArgs:\n    low, high: bounds,\n        in nats.\n    top: of all.\nRaises:\n    ValueError: low."
    assert extension.as_markdown(extension.with_own_entries(text)).splitlines() == [
        *["Clip.", "", "Args:", "    low: bounds,", "        in nats.", "    high: see `low`.", "    top: of all.", ""],
        *["Raises:", "    ValueError: low."],
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if not (is_installed("material") and is_installed("mkdocstrings")):
        pytest.skip("needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_shows_the_same_lists_tables_and_code_as_the_repository(site):
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    for page in sorted((ROOT / "docs").glob("*.md")):
        html = (site / ("index.html" if page.stem == "README" else f"{page.stem}.html")).read_text()
        article = html[html.index("<article") : html.index("</article>")]
        assert _Tags(article).count == _Tags(markdown.render(page.read_text())).count, page.name


def test_pages_load_nothing_from_other_servers(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = _Tags(page.read_text()).addresses
        assert loaded
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == [], page.name


def test_the_reference_has_the_settings_of_components_with_their_types(site):
    html = (site / "api/algorithms.html").read_text()
    entry = html.partition('id="verl.algorithms.advantages.GAE"')[2].partition('id="verl.algorithms.advantages.GRPO"')[
        0
    ]
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", entry))
    assert "gamma: UnitInterval = 1.0" in text
    assert "Generalised advantage estimation" in text
    assert "Raises:" in text


def test_notebooks_are_pages_with_their_pictures(site):
    for notebook in NOTEBOOKS:
        page = (site / f"notebooks/{notebook.stem}.html").read_text()
        pictures = re.findall(rf'src="({notebook.stem}_\d+_\d+\.png)"', page)
        assert pictures
        assert all((site / "notebooks" / name).stat().st_size > 1000 for name in pictures)


def test_notebooks_are_kept_with_small_outputs_and_no_path_of_a_machine():
    for notebook in NOTEBOOKS:
        text = notebook.read_text()
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        assert len(text) < 100_000
        assert any(cell["outputs"] for cell in cells), f"python scripts/run_notebooks.py {notebook.stem}"
        assert not re.search(r"/(home|root|tmp|work)/", text)


LEARNED = {  # what the texts of a notebook claim, in what it prints
    "first_run": [r"accuracy before: 0\.[0-4]\d", r"held-out accuracy 0\.[6-9]|held-out accuracy 1", "last step: True"],
    "own_reward": [r"mean reward: 0\.9", r"at the end: (0\.[89]|1\.0)", "ZeroDivisionError"],
    "agent": [r"episodes: 0\.[0-3]\d before, 0\.90 after", r"turns of an episode: 1\.\d before, 2\.0 after"],
}


@pytest.mark.exhaustive
@pytest.mark.skipif(not (is_installed("nbclient") and is_installed("ipykernel")), reason="needs the extra docs")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_comes_to_what_it_says(notebook):
    done = load("scripts/run_notebooks.py").executed(notebook)
    printed = "".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", ()))
    assert [claim for claim in LEARNED[notebook.stem] if not re.search(claim, printed)] == []
