"""The `pose-plugin` command: its help, its exit codes, and that it imports only what a command needs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from pose_plugin._version import __version__
from pose_plugin.cli.main import COMMANDS, main
from pose_plugin.utils.errors import PoSEError


def test_help_lists_every_command_and_imports_none():
    code = "import sys; from pose_plugin.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted(n for n in sys.modules if n.startswith('pose_plugin.cli.') or n in ('numpy', 'pydantic')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert all(re.search(rf"^    {name}\b", done.stdout, re.M) for name in COMMANDS)
    assert done.stdout.splitlines()[-1] == "['pose_plugin.cli.main', 'pose_plugin.cli.parser']"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert f"usage: pose-plugin {name}" in shown and "options:" in shown


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"pose-plugin {__version__}\n"


COMPLAINTS = {
    "": ["name a command: "],
    "evalute base": ["'evalute' is not a command (did you mean evaluate?)"],
    "--quiet coverage": ["'--quiet' is not an option"],
    "coverage --target-length": ["--target-length: expected one argument"],
    # All at once, and each option as it must be spelled.
    "coverage --target-lenght 32k --train-length 2q --chunks 1e9 --variant papr --sampler x": [
        "'--target-lenght' is not an option (did you mean --target-length?)",
        "--train-length: '2q' is not a number of tokens",
        "--chunks: '1e9' is not a whole number",
        "--variant: 'papr' is not one of paper, reference (did you mean paper?)",
        "--sampler: 'x' is not one of pose",
        "--target-length is missing",
    ],
    "plan a.yaml b.yaml --gpus 0": ["'b.yaml' is one argument too many", "--gpus: '0'"],
    "synthesize": ["PATH is missing", "--output is missing", "--tokenizer is missing", "--model is missing"],
    "check": ["FOLDER is missing"],
    "init base --gpus 2000 --target-length 80q": ["--gpus: 2000 is not from 0 to 1024", "--target-length: '80q'"],
}


@pytest.mark.parametrize("line", COMPLAINTS)
def test_every_complaint_about_a_line_comes_at_once(line, capsys):
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert [sentence for sentence in COMPLAINTS[line] if sentence not in err] == []
    assert "--help" in err.splitlines()[-1] and "usage" not in err


def test_the_value_of_an_unknown_option_is_not_shown(capsys):
    """Somebody may pass a key so."""
    for line in (
        "synthesize docs --api-key sk-SECRET",
        "plan --api-key=sk-SECRET",
        "check x --key sk-SECRET",
        "synthesize --token=sk-SECRET",
        "plan --token=sk-SECRET",
        "synthesize --quiet=sk-SECRET",
    ):
        assert main(line.split()) == 2
    assert "SECRET" not in capsys.readouterr().err


@pytest.mark.parametrize("line", [line for line in COMPLAINTS if line and not line.startswith("check")])
def test_complaints_come_before_heavy_imports(line):
    code = f"import sys; from pose_plugin.cli.main import main; main({line.split()!r}); "
    code += "print(sorted({'torch', 'transformers', 'matplotlib', 'openai'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    "error, code, shown",
    [
        (PoSEError("sampler=x cannot work"), 2, "pose-plugin coverage: sampler=x cannot work"),
        (FileExistsError(17, "File exists", "out"), 2, "pose-plugin coverage: out cannot be used (File exists)"),
        (KeyboardInterrupt(), 130, "pose-plugin coverage: interrupted"),
        (OSError(28, "No space left on device"), 1, "pose-plugin coverage: a file cannot be written: No space left"),
        (OSError(28, "No space left", "out"), 1, "pose-plugin coverage: out cannot be written: No space left"),
        (OSError(12, "Cannot allocate memory"), 1, "pose-plugin coverage: Cannot allocate memory"),
        (OSError("a hub cannot be reached"), 1, "pose-plugin coverage: OSError: a hub cannot be reached"),
        (MemoryError(), 1, "pose-plugin coverage: there is not enough memory"),
        (ValueError("of\na library"), 1, "pose-plugin coverage: ValueError: of a library (set POSE_TRACEBACK=1"),
        (PoSEError("a file\x1b[31m.txt \udcff"), 2, "pose-plugin coverage: a file\\x1b[31m.txt \\udcff"),
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


@pytest.mark.parametrize("error", [TypeError("a bug"), ValueError("wanted")])
def test_what_keeps_its_traceback(error, monkeypatch):
    def fail(parser):
        def run(args):
            raise error

        return run

    monkeypatch.setenv("POSE_TRACEBACK", "1")
    monkeypatch.setattr("pose_plugin.cli.coverage.add_arguments", fail)
    with pytest.raises(type(error)):
        main(["coverage"])
