"""A checkpoint of another format is refused with what to do, and one that would break is told with the reason."""

from __future__ import annotations

import pytest
from golden_run import as_of_format, golden_run
from packaging.version import Version

import verl
from verl.checkpoint.core import checkpoint
from verl.checkpoint.core.checkpoint import FormatOf, findings, format_of, parse_version
from verl.checkpoint.core.manifest import FORMAT_VERSION
from verl.checkpoint.manager import CheckpointManager
from verl.errors import CheckpointTooOld, ConfigError

# As it might be in some years.
TABLE = (
    FormatOf("0.1.0", writes="0.9.0", reads_from="0.9.0"),
    FormatOf("0.3.0", writes="1.0.0", reads_from="0.9.0"),
    FormatOf("0.4.0", writes="1.1.0", reads_from="1.0.0"),
    FormatOf("0.5.0", writes="2.0.0", reads_from="1.0.0"),
)


def test_the_table_says_what_this_version_writes():
    row = format_of(Version(verl.__version__))
    assert row.writes == FORMAT_VERSION
    assert [Version(row.verl) for row in checkpoint.FORMATS] == sorted(Version(row.verl) for row in checkpoint.FORMATS)


CHANGES = {
    "to a patch release": ("1.0.0", "0.3.5", None),
    "a later minor is read": ("1.3.0", "0.4.0", None),
    "to one that reads no 0.x any more": ("0.9.0", "0.4.0", "older than 1.0.0, the oldest that verl 0.4.0 reads"),
    "back across a major": ("2.0.0", "0.4.1", "of a newer major version than 1.1.0, the newest that verl 0.4.1 reads"),
    "back before the first": ("0.9.0", "0.0.9", "no checkpoints of this kind; the first version that has is 0.1.0"),
    "a format nobody knows": ("3.0.0", "0.9.0", "than 2.0.0, the newest that verl 0.5.0 knows of verl 0.9.0"),
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


OLD = {
    "an older format": ({"format": {"name": "verl-checkpoint", "version": "0.9.0"}}, "verl 0.2.0 was the last"),
    "an older version of verl": ({"verl_version": "0.2.0"}, "verl 0.2.0 wrote it, which verl 0.2.0 was the last"),
    "deltas": (
        {"deltas": [{"delta": "actor/model.safetensors.delta"}]},
        "stores files as deltas, which commit 111e8ee5",
    ),
}


@pytest.mark.parametrize("kind", OLD)
def test_a_checkpoint_that_is_not_read_any_more_is_refused_with_the_last_version_that_reads_it(kind, tmp_path):
    addition, reason = OLD[kind]
    as_of_format(golden_run(tmp_path / "run") / "global_step_200", "1.0.0", addition=addition)
    with pytest.raises(CheckpointTooOld, match=rf"global_step_200: manifest\.json: .*{reason}"):
        CheckpointManager(tmp_path / "run").step  # noqa: B018
    assert not CheckpointManager(tmp_path / "run").is_valid()


@pytest.mark.parametrize(
    ("addition", "reason"),
    [
        ({"verl_version": "0.2.0"}, "verl 0.2.0 wrote it, and verl 0.3.0 reads those of 0.3.0 and later"),
        ({"deltas": [{"delta": "actor/x.delta"}]}, "it stores files as deltas, which verl 0.3.0 does not read"),
    ],
)
def test_what_this_version_refuses_breaks_and_earlier_versions_read_it(addition, reason, tmp_path):
    directory = golden_run(tmp_path / "run") / "global_step_200"
    as_of_format(directory, "1.0.0", addition=addition)
    for to, breaks in (("0.3.0", reason), ("0.2.0", None)):
        (finding,) = findings([directory], Version("0.2.0"), Version(to))
        assert finding.breaks == breaks


def test_what_cannot_be_read_breaks(tmp_path):
    directory = golden_run(tmp_path / "checkpoints") / "global_step_200"
    for content in (b"{}", b"", b'{"format": {"name": "other", "version": "1.0.0"}}'):
        (directory / "manifest.json").write_bytes(content)
        assert "cannot be read" in (findings([directory], Version("0.1.0"), Version("0.1.0"))[0].breaks or "")


@pytest.mark.parametrize("text", ["", "latest", "v", "1.x"])
def test_what_is_no_version_is_refused(text):
    with pytest.raises(ConfigError, match=r"--to is .* must be a version"):
        parse_version(text, "--to")
