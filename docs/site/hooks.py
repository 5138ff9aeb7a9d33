"""Hooks of MkDocs for pages that are also read in the repository.

* Notebooks of `examples/notebooks/` become pages, with the outputs that they were saved with.
* The API reference is made from `api.yaml`, and tables of the code are those that `make docs` wrote to build/tables/.
* A link to a file outside docs/ leads to the repository, whose address is `extra.repository` in mkdocs.yml; without
  one it is shown as code.
* Python-Markdown wants four spaces below a list item, and an empty line before a list and around code; GitHub does not.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "examples/notebooks"
TABLES = ("fields", "models", "scaling", "plans")
REFERENCE = """Made from the docstrings: what `import verl` exports, and the base classes of components of your own.
Names that begin with an underscore, and modules that are on no page, are internal: they change without notice."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")
ITEM = re.compile(r"(?:[*-]|\d+\.) ")
NARROW = re.compile(r" {2,3}\S")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, pictures = page_of(notebook)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for name, text in reference().items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    for name in TABLES:
        made = ROOT / f"build/tables/{name}.md"
        text = (
            made.read_text() if made.is_file() else f"# {name.capitalize()}\n\n`python scripts/make_tables.py {name}`\n"
        )
        files.append(File.generated(config, f"tables/{name}.md", content=text))
    return files


def reference() -> dict[str, str]:
    """Pages of the API reference by name, with the index of them."""
    pages = yaml.safe_load((ROOT / "docs/site/api.yaml").read_text())
    texts = {
        name: "\n\n".join([f"# {page['title']}", page["text"], *(f"::: {path}" for path in page["names"])]) + "\n"
        for name, page in pages.items()
    }
    index = "".join(f"* [{page['title']}]({name}.md): {page['text']}\n" for name, page in pages.items())
    return {"README": f"# API reference\n\n{REFERENCE}\n\n{index}", **texts}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def rewritten(link: re.Match[str]) -> str:
        path, _, _ = link[2].partition("#")
        target = (folder / path).resolve()
        if target.is_relative_to(config.docs_dir) or not target.is_relative_to(ROOT):
            return link[0]
        if target.suffix == ".ipynb":
            up = "../" * page.file.src_uri.count("/")
            return f"[{link[1]}]({up}notebooks/{target.stem}.md)"
        address = config.extra["repository"]
        return f"[{link[1]}]({address}{target.relative_to(ROOT)})" if address else f"`{link[1].strip('`')}`"

    return LINK.sub(rewritten, with_wide_lists(markdown))


def with_wide_lists(markdown: str) -> str:
    """The page with what Python-Markdown needs to see the same lists, tables and code as GitHub."""
    lines: list[str] = []
    in_code, in_list, loose = False, False, False
    for line in markdown.splitlines():
        is_fence = line.startswith("```")
        is_item = bool(ITEM.match(line)) and not in_code
        opens_block = (is_fence and not in_code) or (is_item and (loose or not in_list))
        if lines and lines[-1].strip() and (opens_block or (lines[-1] == "```" and not in_code)):
            lines.append("")
        in_code ^= is_fence
        in_list = not in_code and (is_item or (in_list and (not line.strip() or line.startswith("  "))))
        loose = in_list and (loose or not line.strip())
        lines.append(f"    {line.lstrip()}" if in_list and NARROW.match(line) else line)
    return "\n".join(lines)


def page_of(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    cells = json.loads(notebook.read_text())["cells"]
    where = notebook.relative_to(ROOT)
    parts, pictures = [f"<!-- {where} -->"], {}
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../../docs/", "](../").replace(".ipynb)", ".md)"))
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            for place, output in enumerate(cell["outputs"]):
                if picture := output.get("data", {}).get("image/png"):
                    name = f"{notebook.stem}_{number}_{place}.png"
                    pictures[name] = base64.b64decode(picture)
                    parts.append(f"![output of the cell]({name})")
                elif text := ESCAPES.sub("", "".join(texts_of(output))).rstrip():
                    parts.append(f"```text\n{text}\n```")
    parts.append(f"This page is the notebook `{where}`, as it was run.")
    return "\n\n".join(parts) + "\n", pictures


def texts_of(output: dict[str, Any]) -> Iterator[str]:
    """The lines of an output: what was printed, or the value of the last expression."""
    yield from output.get("text", output.get("data", {}).get("text/plain", ()))
