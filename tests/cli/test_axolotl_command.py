"""`axolotl pose …` runs the commands of `pose-plugin`."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

click = pytest.importorskip("click")

from click.testing import CliRunner  # noqa: E402

TARGET = "pose_plugin.cli.axolotl:pose"
ENTRY = EntryPoint("pose", TARGET, "axolotl.cli_commands")


def test_the_package_declares_it():
    project = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points."axolotl.cli_commands"]\npose = "{TARGET}"\n' in project


def test_the_words_reach_the_command():
    assert isinstance(ENTRY.load(), click.Command)
    run = CliRunner().invoke(ENTRY.load(), ["coverage", "--target-length", "512", "--train-length", "64"])
    assert run.exit_code == 0 and "512" in run.output
    assert CliRunner().invoke(ENTRY.load(), ["coverage", "--target-length", "32"]).exit_code == 2


def test_help_lists_the_commands():
    run = CliRunner().invoke(ENTRY.load(), ["--help"])
    assert run.exit_code == 0 and "coverage" in run.output and "plan" in run.output


def test_axolotl_lists_it(monkeypatch):
    plugins = pytest.importorskip("axolotl.cli.plugins")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [ENTRY])
    group = plugins.PluginCommandGroup()
    assert "pose" in group.list_commands(None)
    assert "plan, check" in group.get_command(None, "pose").get_short_help_str(200)
