"""A checkpoint of another format is refused with what to do, and one that would break is told with the reason."""

import pytest
from golden_run import as_of_format, golden_run
from packaging.version import Version

import verl
from verl.checkpoint.core import checkpoint
from verl.checkpoint.core.checkpoint import FormatOf, findings, format_of, parse_version
from verl.checkpoint.core.manifest import FORMAT_VERSION
from verl.checkpoint.manager import CheckpointManager
from verl.errors import CheckpointCorrupt, ConfigError

# As it might be in some years.
TABLE = (FormatOf("0.3.0", writes="1.0.0"), FormatOf("0.4.0", writes="1.1.0"), FormatOf("0.5.0", writes="2.0.0"))


def test_the_table_says_what_this_version_writes():
    row = format_of(Version(verl.__version__))
    assert row.writes == FORMAT_VERSION
    assert [Version(row.verl) for row in checkpoint.FORMATS] == sorted(Version(row.verl) for row in checkpoint.FORMATS)


CHANGES = {
    "to a patch release": ("1.0.0", "0.3.5", None),
    "a later minor is read": ("1.3.0", "0.4.0", None),
    "back across a major": (
        "2.0.0",
        "0.4.1",
        "not of the major versions up to 1.1.0, the newest that verl 0.4.1 reads",
    ),
    "back before the first": ("1.0.0", "0.0.9", "no checkpoints of this kind; the first version that has is 0.3.0"),
    "a format nobody knows": ("3.0.0", "0.9.0", "up to 2.0.0, the newest that verl 0.5.0 knows of verl 0.9.0"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_version_breaks(kind, tmp_path, monkeypatch):
    written, to, reason = CHANGES[kind]
    monkeypatch.setattr(checkpoint, "FORMATS", TABLE)
    monkeypatch.setattr(verl, "__version__", "0.5.0")
    directory = golden_run(tmp_path / "checkpoints") / "global_step_200"
    as_of_format(directory, written)
    (finding,) = findings([directory], Version("0.3.5"), parse_version(f"v{to}", "--to"))
    assert (finding.format_version, finding.name) == (written, "global_step_200")
    assert finding.breaks is None if reason is None else reason in (finding.breaks or "")


def test_a_checkpoint_of_before_the_first_format_is_refused(tmp_path):
    as_of_format(golden_run(tmp_path / "run") / "global_step_200", "0.9.0")
    with pytest.raises(CheckpointCorrupt, match=r"format 0\.9\.0, of a version of verl before"):
        CheckpointManager(tmp_path / "run/global_step_200").step  # noqa: B018


def test_what_cannot_be_read_breaks(tmp_path):
    directory = golden_run(tmp_path / "checkpoints") / "global_step_200"
    for content in (b"{}", b"", b'{"format": {"name": "other", "version": "1.0.0"}}'):
        (directory / "manifest.json").write_bytes(content)
        assert "cannot be read" in (findings([directory], Version("0.1.0"), Version("0.1.0"))[0].breaks or "")


@pytest.mark.parametrize("text", ["", "latest", "v", "1.x"])
def test_what_is_no_version_is_refused(text):
    with pytest.raises(ConfigError, match=r"--to is .* must be a version"):
        parse_version(text, "--to")
