"""Start llama.cpp's server and `transformers serve` on a folder; also for benchmarks/served.py.

llama.cpp is found on PATH (llama-server, and convert-hf-to-gguf or convert_hf_to_gguf.py), or in the folder that
POSE_LLAMA_CPP names.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

# The converter knows tokenizers by a hash of what they make of a text, which no tokenizer of a test has. It takes those
# that transformers 5 has saved for tokenizers of Llama 2, and the server would then write "Ġ" for a space.
CONVERT = """
import runpy, sys
home, model, file = sys.argv[1:]
sys.path.insert(0, home)
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
base.TextModel._set_vocab_llama_hf = base.TextModel._set_vocab_gpt2
sys.argv = ["convert", model, "--outfile", file, "--outtype", "f32"]
runpy.run_path(home + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def llama_cpp() -> tuple[str, Path] | None:
    """Return llama-server and the folder of the converter; None without llama.cpp."""
    home = os.environ.get("POSE_LLAMA_CPP")
    server = shutil.which("llama-server", path=f"{home}/bin:{home}" if home else None)
    if server is None:
        return None
    above = [Path(home)] if home else [Path(server).resolve().parent.parent]
    found = next((file for root in above for file in sorted(root.rglob("convert_hf_to_gguf.py"))), None)
    if found is None:
        return None
    # Debian puts the script and the package that it imports into different folders.
    package = next((each for each in above[0].rglob("conversion") if (each / "base.py").is_file()), None)
    beside = package.parent if package and (package.parent / found.name).is_file() else found.parent
    return server, beside


def to_gguf(converter: Path, folder: Path, file: Path) -> Path:
    """Convert a folder to GGUF in float32."""
    command = [sys.executable, "-c", CONVERT, str(converter), str(folder), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return file


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def llama_server(program: str, file: Path, *options: str):
    """Serve a GGUF file and yield the URL."""
    port = free_port()
    command = [program, "-m", str(file), "--host", "127.0.0.1", "--port", str(port), "-np", "1", "-t", "1", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "listening" in line:
                break
        else:
            raise AssertionError("".join(lines[-20:]))
        # A full pipe would stop the server.
        drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()
        if "drain" in locals():
            drain.wait()


def has_transformers_serve() -> bool:
    return all(importlib.util.find_spec(name) for name in ("uvicorn", "fastapi", "transformers.cli.serving"))


@contextmanager
def transformers_server(folder: Path):
    """Serve a folder by `transformers serve` in this process, and yield the URL."""
    from transformers.cli.serve import Serve

    # Another program may take the port before the server does; then the thread ends.
    for _ in range(5):
        port = free_port()
        serve = Serve(str(folder), device="cpu", host="127.0.0.1", port=port, log_level="error", non_blocking=True)
        while not serve.server.started and serve._thread.is_alive():
            serve._thread.join(0.05)
        if serve.server.started:
            break
    try:
        assert serve.server.started
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        serve.kill_server()
