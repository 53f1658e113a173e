"""`pose-plugin doctor --url` against llama.cpp's server and `transformers serve`, if they are installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("openai")

from pose_plugin.cli.main import main
from tests.doctor import real_servers

BASE = Path(__file__).parents[2] / "example_configs" / "quickstart" / "base"
LLAMA_CPP = real_servers.llama_cpp()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The quick start's base, extended 128 → 512 and not trained; and the same weights without the override."""
    place = tmp_path_factory.mktemp("served")
    shutil.copytree(BASE, place / "plain")
    shutil.copytree(BASE, place / "scaled")
    config = json.loads((BASE / "config.json").read_text(encoding="utf-8"))
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
    changed = {**config, "rope_parameters": rope, "max_position_embeddings": 512}
    (place / "scaled" / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    return place


def ask(url, folder, capsys, *words):
    capsys.readouterr()
    code = main(["doctor", "--url", url, "--like", str(folder), "--lengths", "100,400", "--yes", "--json", *words])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.skipif(LLAMA_CPP is None, reason="llama.cpp is not installed")
def test_llama_cpp(folders, capsys):
    program, converter = LLAMA_CPP
    file = real_servers.to_gguf(converter, folders / "scaled", folders / "scaled.gguf")
    with real_servers.llama_server(program, file, "-c", "0") as url:
        _, applied = ask(url, folders / "scaled", capsys)
    with real_servers.llama_server(program, file, "-c", "256", "--rope-scaling", "none") as url:
        code, ignored = ask(url, folders / "scaled", capsys, "--compare", "64,128")
    assert applied["rope"] == "applied" and applied["distances"]["as configured"] < 0.01
    assert applied["logprobs"] and not applied["chat"] and applied["window"] == 512
    assert ignored["rope"] == "other" and code == 2
    assert min(ignored["distances"], key=ignored["distances"].get) == "without its scaling"
    refused = [needle["refused"] for needle in ignored["needles"] if needle["refused"]]
    assert len(refused) == 3 and "256" in refused[0], "400 tokens do not fit, 100 do"
    assert {"max_model_len", "lengths"} <= {finding["key"] for finding in ignored["findings"]}


@pytest.mark.skipif(not real_servers.has_transformers_serve(), reason="transformers serve is not installed")
@pytest.mark.parametrize("served, verdict", [("scaled", "applied"), ("plain", "other")])
def test_transformers_serve(folders, served, verdict, capsys):
    with real_servers.transformers_server(folders / served) as url:
        _, found = ask(url, folders / "scaled", capsys, "--model", str(folders / served))
        assert found["rope"] == verdict and not found["logprobs"]
        assert main(["doctor", "--url", url, "--model", "another", "--lengths", "100", "--yes"]) == 2
        assert "--model another" in capsys.readouterr().err
        assert main(["doctor", "--url", url, "--lengths", "100", "--yes"]) == 2
        assert "--model" in capsys.readouterr().err
