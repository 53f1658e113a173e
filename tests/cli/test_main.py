"""The `pose-plugin` command: its help, its exit codes, and that it imports only what a command needs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from pose_plugin.cli.main import COMMANDS, main
from pose_plugin.utils.errors import PoSEError


def test_help_lists_every_command_and_imports_none():
    code = "import sys; from pose_plugin.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted(n for n in sys.modules if n.startswith('pose_plugin.cli.') or n in ('numpy', 'pydantic')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert all(re.search(rf"^    {name}\b", done.stdout, re.M) for name in COMMANDS)
    assert done.stdout.splitlines()[-1] == "['pose_plugin.cli.main']"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert f"usage: pose-plugin {name}" in shown and "options:" in shown


@pytest.mark.parametrize("line", [[], ["unheard"], ["coverage", "--unheard"]])
def test_a_line_that_argparse_refuses(line, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(line)
    assert "usage: pose-plugin" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, shown",
    [
        (PoSEError("sampler=x cannot work"), 2, "pose-plugin coverage: sampler=x cannot work"),
        (FileExistsError(17, "File exists", "out"), 2, "pose-plugin coverage: out cannot be used (File exists)"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(error, code, shown, monkeypatch, capsys):
    def fail(parser):
        def run(args):
            raise error

        return run

    monkeypatch.setattr("pose_plugin.cli.coverage.add_arguments", fail)
    assert main(["coverage"]) == code
    assert shown in capsys.readouterr().err


def test_an_os_error_without_a_file_keeps_its_traceback(monkeypatch):
    def fail(parser):
        def run(args):
            raise OSError(12, "Cannot allocate memory")

        return run

    monkeypatch.setattr("pose_plugin.cli.coverage.add_arguments", fail)
    with pytest.raises(OSError, match="allocate"):
        main(["coverage"])
