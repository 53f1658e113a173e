"""Commands that write several files: a full disk or a kill leaves the folder as it was, and the command can be rerun.

POSE_KILLS=40 kills each command at that many places instead of a few.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from pose_plugin.checkpoints import check
from pose_plugin.cli.main import main
from pose_plugin.export import ENGINES, exporter
from tests.export.test_saved_format import FILES
from tests.forked import CaseError, forked

# Imported here, so that no forked child has to.
import_module("pose_plugin.export.card")
for name in ENGINES:
    exporter(name)
pytest.importorskip("huggingface_hub").ModelCard("---\n{}\n---\n").data.to_yaml()
KILLS = int(os.environ.get("POSE_KILLS", "3"))
REPORT = "| model | 512 |\n| --- | ---: |\n| full | 0.98 |\n"
# Each command, with {0} for the folder that holds everything.
COMMANDS = {
    "card": ["card", "{0}/model", "--evaluation", "{0}/judged"],
    "repair": ["check", "{0}/merged", "--like", "{0}/adapter", "--repair"],
    "modelfile": ["export", "{0}/model", "--engine", "ollama"],
    "form 4": ["export", "{0}/model", "--engine", "transformers", "--form", "4", "--output", "{0}/older"],
    "coverage": [
        *("coverage", "--target-length", "64", "--train-length", "16", "--draws", "20", "--no-figures"),
        *("--output", "{0}/coverage.png"),
    ],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A model, an adapter, that adapter merged, and an evaluation; only their small files are real."""
    home = tmp_path_factory.mktemp("whole")
    for name in ("model", "adapter", "merged", "judged"):
        (home / name).mkdir()
    for name, values in FILES.items():
        (home / "adapter" / name).write_text(json.dumps(values))
        if name != "adapter_config.json":
            (home / "model" / name).write_text(json.dumps(values))
    plain = {key: FILES["config.json"][key] for key in ("model_type", "hidden_size", "num_attention_heads")}
    (home / "merged" / "config.json").write_text(json.dumps(plain | {"max_position_embeddings": 64}))
    (home / "merged" / "generation_config.json").write_text(json.dumps({"max_length": 64}))
    for folder in ("model", "merged"):
        (home / folder / "model.safetensors").write_bytes(b"weights")
    (home / "judged" / "report.md").write_text(REPORT)
    (home / "judged" / "results.json").write_text("{}")
    (home / "judged" / "passkey.png").write_bytes(b"png")
    return home


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def run(home: Path, name: str, before: Callable[[], None] = lambda: None) -> int:
    """Run a command in this process, with nothing reloaded."""
    check._run_worker = lambda request, python, timeout: {"error": "not asked"}
    os.chdir(home)
    before()
    return main([word.format(home) for word in COMMANDS[name]])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_changes_nothing_and_is_reported_in_a_sentence(home, tmp_path, name):
    place = Path(shutil.copytree(home, tmp_path / "place"))
    before = contents(place)

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def case() -> tuple[int, str]:
        import contextlib
        import io

        text = io.StringIO()
        with contextlib.redirect_stderr(text), contextlib.redirect_stdout(io.StringIO()):
            code = run(place, name, full)
        # Otherwise what the child returns could not be written.
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return code, text.getvalue()

    code, text = forked(case).value
    assert code == 1 and str(place) in text and "MiB are free" in text and ".part" not in text, text
    assert contents(place) == before
    # With room again, the same command does its work.
    forked(run, place, name)
    assert contents(place) == finished(home, tmp_path, name)


def finished(home: Path, tmp_path: Path, name: str) -> dict[str, bytes]:
    """What an uninterrupted command leaves."""
    place = tmp_path / "whole"
    if not place.exists():
        shutil.copytree(home, place)
        forked(run, place, name)
    return contents(place)


def watched(seen: Callable[[], None], place: Path) -> Callable[[], None]:
    """Return a function after which `seen` is called at each opening, renaming or removal below a folder."""

    def hook(event: str, arguments: tuple) -> None:
        known = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.copyfile")
        if event in known and str(arguments[0]).startswith(str(place)):
            seen()

    return lambda: sys.addaudithook(hook)


def steps(home: Path, tmp_path: Path, name: str) -> int:
    """How often a command touches the folder."""
    place = Path(shutil.copytree(home, tmp_path / "counted"))

    def case() -> int:
        count = [0]

        def seen() -> None:
            count[0] += 1

        run(place, name, watched(seen, place))
        return count[0]

    return forked(case).value


@pytest.mark.parametrize("name", COMMANDS)
def test_after_a_kill_the_same_command_ends_as_if_uninterrupted(home, tmp_path, name):
    before, after, last = contents(home), finished(home, tmp_path, name), steps(home, tmp_path, name)
    for number in range(KILLS):
        moment = 1 + number * last // KILLS
        place = Path(shutil.copytree(home, tmp_path / f"killed{number}"))

        def case(place: Path = place, moment: int = moment) -> None:
            left = [moment]

            def seen() -> None:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            run(place, name, watched(seen, place))

        with pytest.raises(CaseError, match="the child died"):
            forked(case)
        for file, content in contents(place).items():
            # Every file is whole: as it was, as it will be, or in a folder that uploads leave out.
            unfinished = any(part.startswith("_") and part.endswith(".part") for part in Path(file).parts)
            assert unfinished or content in (before.get(file), after.get(file)), (moment, file)
        forked(run, place, name)
        assert contents(place) == after, moment
        shutil.rmtree(place)


def test_an_empty_modelfile_is_written_again(home, tmp_path):
    """An interrupted export of an earlier version could leave one."""
    place = Path(shutil.copytree(home, tmp_path / "place"))
    (place / "model" / "Modelfile").touch()
    forked(run, place, "modelfile")
    assert "num_ctx 512" in (place / "model" / "Modelfile").read_text()
