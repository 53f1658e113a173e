"""Commands that write files: a full disk or a kill leaves the folder as it was, and the command can be rerun."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from pose_plugin.checkpoints import check
from pose_plugin.cli.main import main
from pose_plugin.export import ENGINES, exporter
from tests.doctor.broken import QWEN3, yarn
from tests.export.test_saved_format import FILES
from tests.forked import forked
from tests.kill import files, survives

pytest.importorskip("matplotlib")
# Imported here, so that no forked child has to.
for name in ("export.card", "doctor.mend"):
    import_module(f"pose_plugin.{name}")
for name in ENGINES:
    exporter(name)
pytest.importorskip("huggingface_hub").ModelCard("---\n{}\n---\n").data.to_yaml()
REPORT = "| model | 512 |\n| --- | ---: |\n| full | 0.98 |\n"
# Each command, with {0} for the folder that holds everything.
COMMANDS = {
    "card": ["card", "{0}/model", "--evaluation", "{0}/judged"],
    "repair": ["check", "{0}/merged", "--like", "{0}/adapter", "--repair"],
    "modelfile": ["export", "{0}/model", "--engine", "ollama"],
    "form 4": ["export", "{0}/model", "--engine", "transformers", "--form", "4", "--output", "{0}/older"],
    "mend": ["doctor", "{0}/broken", "--mend", "{0}/new/mended"],
    "init": [
        *("init", "base", "--target-length", "2k", "--data", "rows.jsonl", "--gpus", "0", "--output", "{0}/c.yaml"),
    ],
    "init for TRL": [
        *("init", "base", "--target-length", "2k", "--data", "rows.jsonl", "--gpus", "0", "--output", "{0}/c.py"),
    ],
    "plan": [
        *("plan", "--base", "base", "--target-length", "2k", "--train-length", "512", "--steps", "10"),
        *("--draws", "20", "--output", "{0}/new/plan.png"),
    ],
    "coverage": [
        *("coverage", "--target-length", "64", "--train-length", "16", "--draws", "20"),
        *("--output", "{0}/new/coverage.png"),
    ],
}
# Its errors are those of another program.
ON_A_DISK_WITH_ROOM = {
    "convert": [
        *("export", "{0}/model", "--engine", "llama.cpp", "--convert", "--llama-cpp", "{0}/llama.cpp"),
        *("--output", "{0}/model.gguf"),
    ],
}
CONVERTER = """
with open(sys.argv[sys.argv.index("--outfile") + 1], "w") as file:
    for _ in range(3):
        print("weights", file=file, flush=True)
"""
BASE = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip


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
    for name, config in {"base": BASE, "broken": {**QWEN3, "rope_scaling": yarn(4.0, 32768)}}.items():
        (home / name).mkdir()
        (home / name / "config.json").write_text(json.dumps(config))
    (home / "broken" / "model.safetensors").write_bytes(b"weights")
    (home / "rows.jsonl").write_text('{"text": "w30 w31"}\n' * 4)
    (home / "llama.cpp").mkdir()
    (home / "llama.cpp" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    before = os.getcwd()
    os.chdir(shutil.copytree(home, tmp_path_factory.mktemp("warm") / "home"))
    for name in ("init", "plan", "coverage"):
        # What a run imports, the forked children have then already.
        assert main([word.format(".") for word in COMMANDS[name]]) == 0
    os.chdir(before)
    return home


def run(home: Path, name: str, before: Callable[[], None] = lambda: None) -> int:
    """Run a command in this process, with nothing reloaded."""
    check._run_worker = lambda request, python, timeout: {"error": "not asked"}
    os.chdir(home)
    before()
    return main([word.format(home) for word in (COMMANDS | ON_A_DISK_WITH_ROOM)[name]])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_changes_nothing_and_is_reported_in_a_sentence(home, tmp_path, name):
    place = Path(shutil.copytree(home, tmp_path / "place"))
    before = files(place)

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
    assert files(place) == before
    # With room again, the same command does its work.
    whole = Path(shutil.copytree(home, tmp_path / "whole"))
    forked(run, whole, name)
    forked(run, place, name)
    assert files(place) == files(whole) != before


@pytest.mark.parametrize("name", COMMANDS | ON_A_DISK_WITH_ROOM)
def test_after_a_kill_the_same_command_ends_as_if_uninterrupted(home, tmp_path, name):
    def prepare(place: Path) -> None:
        shutil.copytree(home, place)

    survives(lambda place: run(place, name), tmp_path, prepare=prepare, whole=True)


def test_an_empty_modelfile_is_written_again(home, tmp_path):
    """An interrupted export of an earlier version could leave one."""
    place = Path(shutil.copytree(home, tmp_path / "place"))
    (place / "model" / "Modelfile").touch()
    forked(run, place, "modelfile")
    assert "num_ctx 512" in (place / "model" / "Modelfile").read_text()
