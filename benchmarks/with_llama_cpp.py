"""Run llama.cpp for engines.py, in the interpreters that have it.

    python with_llama_cpp.py convert HOME MODEL FILE   # HOME holds convert_hf_to_gguf.py; needs torch, transformers
    python with_llama_cpp.py logits FILE ROWS OUTPUT   # needs llama-cpp-python

The file has no vocabulary, because the converter does not know the tiny tokenizer; token ids are passed directly.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path


def convert(home: str, model: str, file: str) -> None:
    """Run llama.cpp's converter without its tokenizer part."""
    sys.path[:0] = [home, str(Path(home) / "gguf-py")]
    from conversion import base, llama

    for cls in (base.TextModel, llama.LlamaModel):
        cls.set_vocab = lambda self: self._set_vocab_none()
    sys.argv = ["convert_hf_to_gguf.py", model, "--outtype", "f32", "--outfile", file]
    runpy.run_path(str(Path(home) / "convert_hf_to_gguf.py"), run_name="__main__")


def logits(file: str, rows_file: str, output: str) -> None:
    """Write logits [k, vocabulary] of the last k positions of each row {"ids": [n], "keep": k, "plain": bool}.

    `plain` ignores the file's RoPE scaling. Everything is float32, at positions 0 … n−1.
    """
    import llama_cpp as lib
    import numpy as np

    rows = json.loads(Path(rows_file).read_text())
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    found = {"trained": lib.llama_model_n_ctx_train(model)}
    for number, row in enumerate(rows):
        ids = row["ids"]
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = len(ids)
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = lib.GGML_TYPE_F32
        if row["plain"]:
            params.rope_scaling_type = lib.LLAMA_ROPE_SCALING_TYPE_NONE
        context = lib.llama_init_from_model(model, params)
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        kept = range(len(ids) - row["keep"], len(ids))
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, i, 1, 0
            batch.logits[i] = int(i in kept)
        if lib.llama_decode(context, batch) != 0:
            raise SystemExit(f"llama.cpp could not decode row {number}")
        got = [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), shape=(size,)).copy() for i in kept]
        found[f"row{number}"] = np.stack(got)
        lib.llama_batch_free(batch)
        lib.llama_free(context)
    np.savez(output, **found)


if __name__ == "__main__":
    {"convert": convert, "logits": logits}[sys.argv[1]](*sys.argv[2:])
