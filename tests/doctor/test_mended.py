"""The repaired copy of a folder, loaded by transformers, is the model as it was meant: same rope, window and logits."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from pose_plugin.cli.main import main
from pose_plugin.doctor import read_folder
from pose_plugin.doctor.engines import readings
from pose_plugin.rope.kinds import inverse_frequencies
from tests.models import make_llama

# Another base than the default of the class: a reader that loses it is found.
BASE = 50000.0
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": BASE}
NEW_READERS = ("transformers ≥ 5", "vllm ≥ 0.30", "vllm < 0.30", "sglang 0.5", "llama.cpp 2026")
OLD_READERS = ("transformers 4", "mlx 0.32", "tgi 3.3")


def each(value, engines=(*NEW_READERS, *OLD_READERS), **others):
    """Return a value for each engine."""
    return dict.fromkeys(engines, value) | {key.replace("_", " "): each for key, each in others.items()}


# How people extend a model of window 64 to 256: what they change in config.json, whether the model before training is
# named, and the window that each engine takes from the folder as it is. None: the engine stops.
BROKEN = {
    # huggingface/trl, the guide to long contexts: rope_parameters in model_init_kwargs; the maximum stays.
    "TRL": ({"rope_parameters": {**YARN, "rope_theta": BASE}}, False, each(64) | {"vllm < 0.30": 256}),
    # hiyouga/LlamaFactory sets rope_scaling, which replaces the whole dict in transformers 5, and computes a float.
    "LLaMA-Factory": (
        {"rope_parameters": YARN, "max_position_embeddings": 256.0},
        True,
        # Strict readers stop at a window that is not a whole number.
        each(256) | dict.fromkeys(("transformers ≥ 5", "vllm ≥ 0.30", "sglang 0.5", "llama.cpp 2026")),
    ),
    # modelscope/ms-swift#5146: kind and factor only, and transformers takes the maximum as the original window.
    "ms-swift": (
        {"rope_parameters": {"type": "yarn", "factor": 4.0}},
        True,
        each(64) | dict.fromkeys(("vllm ≥ 0.30", "vllm < 0.30", "sglang 0.5", "llama.cpp 2026")),
    ),
    # unslothai/unsloth raises the maximum and sets linear scaling; vLLM and SGLang multiply the maximum by the factor.
    "Unsloth": (
        {"rope_parameters": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 256},
        True,
        # Readers of the older form see no scaling at all.
        each(256) | dict.fromkeys(("vllm ≥ 0.30", "vllm < 0.30", "sglang 0.5"), 1024),
    ),
    # By hand, as the model cards of Qwen3 say, in a config that transformers 4 saved.
    "by hand, older form": (
        {"rope_parameters": None, "rope_theta": BASE, "rope_scaling": YARN},
        False,
        each(64) | {"vllm < 0.30": 256},
    ),
    # The same in a config that transformers 5 saved: rope_scaling hides rope_parameters, and with it the base
    # (NVIDIA-NeMo/Megatron-Bridge#3077).
    "by hand, both forms": (
        {"rope_parameters": PLAIN, "rope_scaling": YARN},
        False,
        each(64) | {"vllm < 0.30": 256},
    ),
    "by hand, both forms and the maximum": (
        {"rope_parameters": PLAIN, "rope_scaling": YARN, "max_position_embeddings": 256},
        False,
        each(256),
    ),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """The model before training, on disk."""
    folder = tmp_path_factory.mktemp("models") / "before"
    make_llama(head_dim=16, rope_parameters=PLAIN).save_pretrained(folder)
    return folder


def with_config(folder, source, changes):
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in config.items() if value is not None or key not in changes}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder


@pytest.mark.parametrize("trainer", BROKEN)
def test_the_repaired_copy_is_the_model_as_meant(trainer, before, tmp_path):
    changes, named, windows = BROKEN[trainer]
    folder = with_config(tmp_path / "model", before, changes)
    assert {row.engine: row.window for row in readings(read_folder(folder))} == windows
    base = ["--base", str(before)] if named else []
    assert main(["doctor", str(folder), *base, "--mend", str(tmp_path / "mended")]) in (1, 2)
    assert main(["doctor", str(tmp_path / "mended"), *base]) == 0

    meant = {"rope_type": "linear", "factor": 4.0} if trainer == "Unsloth" else dict(YARN)
    meant["rope_theta"] = BASE
    mended = AutoModelForCausalLM.from_pretrained(tmp_path / "mended").eval()
    assert mended.config.max_position_embeddings == 256
    frequencies, scale = inverse_frequencies(meant, 16)
    rope = mended.model.rotary_emb
    torch.testing.assert_close(rope.inv_freq.double(), torch.from_numpy(frequencies), rtol=1e-6, atol=0)
    assert rope.attention_scaling == pytest.approx(scale)

    ids = torch.arange(200)[None] * 7 % 128
    written = with_config(
        tmp_path / "meant", before, {"rope_parameters": meant, "max_position_embeddings": 256, "rope_scaling": None}
    )
    wanted = AutoModelForCausalLM.from_pretrained(written).eval()
    plain = AutoModelForCausalLM.from_pretrained(before).eval()
    with torch.inference_mode():
        assert torch.equal(mended(ids).logits, wanted(ids).logits)
        assert not torch.allclose(mended(ids).logits, plain(ids).logits, atol=1e-4)


@pytest.mark.parametrize("trainer", [name for name, (changes, *_) in BROKEN.items() if name != "LLaMA-Factory"])
def test_the_table_has_what_transformers_takes_from_the_folder_as_it_is(trainer, before, tmp_path):
    folder = with_config(tmp_path / "model", before, BROKEN[trainer][0])
    model = AutoModelForCausalLM.from_pretrained(folder)
    from pose_plugin.checkpoints.saved import Saved
    from pose_plugin.export.engines import RULES, taken

    saved = Saved(folder)
    found = taken(RULES[0], saved)
    frequencies, scale = found.frequencies(16, saved.maximum)
    assert found.default == model.config.max_position_embeddings
    rope = model.model.rotary_emb
    torch.testing.assert_close(rope.inv_freq.double(), torch.from_numpy(frequencies), rtol=1e-6, atol=0)
    assert rope.attention_scaling == pytest.approx(scale)
