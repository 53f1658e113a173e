"""Run the commands that read no weights on folders, in a process that can import neither torch nor transformers.

    python -m tests.doctor.without_torch FOLDER…

It prints a JSON object: by folder and command, the exit code and the last line of stderr.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

sys.modules["torch"] = sys.modules["transformers"] = None  # type: ignore[assignment]

from pose_plugin.cli.main import main  # noqa: E402 - after the modules are hidden
from pose_plugin.export import ENGINES  # noqa: E402

COMMANDS = ["doctor", "check", "card", *(f"export --engine {engine}" for engine in ENGINES)]


def run(folder: str, command: str) -> tuple[int, str]:
    name, *options = command.split()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([name, folder, *options])
    return code, err.getvalue()


if __name__ == "__main__":
    print(json.dumps({folder: {command: run(folder, command) for command in COMMANDS} for folder in sys.argv[1:]}))
