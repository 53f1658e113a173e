"""Unsloth needs a GPU to be imported: here its real source is read, and the functions that decide are run from it."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pose_plugin.frameworks.unsloth import extended_base
from pose_plugin.rope import extend_context, inverse_frequencies
from pose_plugin.training.checks import is_unsloth
from pose_plugin.utils.errors import PoSEError
from tests.forked import good_ranks
from tests.models import edit, make_llama, save

TARGET, WINDOW = 512, 64


# -- ours ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path):
    save(make_llama(), tmp_path / "base")
    return tmp_path / "base"


def test_extended_base_loads_at_the_target(base, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = extended_base(base, tmp_path / "extended", target_length=TARGET, rope="linear")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.max_position_embeddings == TARGET
    assert model.config.rope_parameters["factor"] == TARGET / WINDOW
    for name, weight in make_llama().state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (len(tokenizer), tokenizer.model_max_length) == (128, TARGET)
    assert AutoTokenizer.from_pretrained(base).model_max_length == WINDOW, "the base is as it was"
    assert json.loads((base / "config.json").read_text())["max_position_embeddings"] == WINDOW, "the base is as it was"
    # Once more into the same folder, with another rope.
    extended_base(base, folder, target_length=TARGET, rope="yarn")
    assert AutoModelForCausalLM.from_pretrained(folder).config.rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize("late", [False, True])
def test_every_rank_may_ask_for_the_same_folder(base, tmp_path, late):
    """At once, or one while the other is at its links."""

    def case():
        def signal_of(rank):
            return tmp_path / f"at its links {rank}"

        def slow(*names, link=os.symlink):
            signal_of(os.environ["RANK"]).touch()
            while not (signal_of("0").exists() and signal_of("1").exists()):
                time.sleep(0.01)
            link(*names)

        while late and os.environ["RANK"] == "1" and not signal_of("0").exists():
            time.sleep(0.01)
        os.symlink = slow
        return sorted(os.listdir(extended_base(base, tmp_path / "extended", target_length=TARGET, rope="linear")))

    wanted = sorted(os.listdir(base))
    assert [one.value for one in good_ranks(case)] == [wanted, wanted]


def test_where_no_links_are_possible_a_copy_is_there_whole(base, tmp_path, monkeypatch):
    """Another rank is faster and loads its copy of the weights, which stays whole while this one's is written."""
    loaded, weights, copy = tmp_path / "extended" / "model.safetensors", base / "model.safetensors", shutil.copy2

    def refuse(*names):
        raise PermissionError("no links on this file system")

    def slow(source, target):
        if source == weights:
            copy(weights, loaded)
            Path(target).write_bytes(b"half")
            assert loaded.read_bytes() == weights.read_bytes()
        return copy(source, target)

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(shutil, "copy2", slow)
    folder = extended_base(base, tmp_path / "extended", target_length=TARGET)
    assert loaded.read_bytes() == weights.read_bytes()
    assert sorted(os.listdir(folder)) == sorted(os.listdir(base))


@pytest.mark.parametrize("links", [True, False])
def test_the_weights_of_another_base_are_not_mixed_with_this_config(base, tmp_path, monkeypatch, links):
    def refuse(*names):
        raise PermissionError("no links on this file system")

    if not links:
        monkeypatch.setattr(os, "symlink", refuse)
    folder = extended_base(base, tmp_path / "extended", target_length=TARGET)
    before = Path(folder, "config.json").read_text()
    other = save(make_llama(seed=1), tmp_path / "other")
    os.utime(other / "model.safetensors", (0, 0))
    with pytest.raises(PoSEError, match=r"folder=.* has the \S+ of another base"):
        extended_base(other, folder, target_length=2 * TARGET)
    assert Path(folder, "config.json").read_text() == before
    # The same base for a shorter window, in place.
    extended_base(base, folder, target_length=TARGET // 2)
    limit = json.loads(Path(folder, "tokenizer_config.json").read_text())["model_max_length"]
    assert limit == TARGET // 2


def test_a_limit_that_was_raised_for_a_longer_target_is_put_back(base, tmp_path):
    edit(base / "tokenizer_config.json", lambda values: values.update(model_max_length=TARGET // 2))
    folder = extended_base(base, tmp_path / "extended", target_length=TARGET)
    extended_base(base, folder, target_length=TARGET // 2)
    assert json.loads(Path(folder, "tokenizer_config.json").read_text())["model_max_length"] == TARGET // 2


@pytest.mark.parametrize("where", ["base", "other"])
def test_a_folder_that_holds_something_else_is_left_alone(base, tmp_path, where):
    other = tmp_path / "other"
    other.mkdir()
    (other / "note.txt").write_text("mine")
    before = (base / "config.json").read_text()
    with pytest.raises(PoSEError, match=r"folder=.* is not empty"):
        extended_base(base, tmp_path / where, target_length=TARGET)
    assert (base / "config.json").read_text() == before and [f.name for f in other.iterdir()] == ["note.txt"]


def test_the_trainer_asks(monkeypatch, tmp_path):
    """Before anything else of a run: a model that Unsloth loaded plain is stopped."""
    pytest.importorskip("trl")
    from tests.integration import trl_runs

    trainer = trl_runs.sft(tmp_path, extended=False)
    assert not is_unsloth(trainer.model)
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    trainer.model.max_seq_length = TARGET
    assert is_unsloth(trainer.model)
    with pytest.raises(PoSEError, match=r"max_seq_length=512.*extended_base"):
        trainer.train()


# -- its own -------------------------------------------------------------------------------------------------------


def source(part: str) -> str:
    spec = importlib.util.find_spec("unsloth")
    if spec is None:
        pytest.skip("Unsloth's source is not installed: pip install --no-deps unsloth")
    return (Path(spec.submodule_search_locations[0]) / part).read_text(encoding="utf-8")


def functions(part: str, *names: str, **given) -> dict:
    """Functions and classes out of a file, run without the imports that need a GPU."""
    tree = ast.parse(source(part))
    wanted = [node for node in tree.body if getattr(node, "name", None) in names]
    assert len(wanted) == len(names), f"{part} no longer has all of {names}"
    scope = {"torch": torch, **given}
    exec(compile(ast.Module(wanted, type_ignores=[]), part, "exec"), scope)
    return scope


def theta(config, default=10000.0):
    return (getattr(config, "rope_parameters", None) or {}).get("rope_theta", default)


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3", "ntk"])
def test_its_rotary_module_takes_our_frequencies(rope):
    """From the same config, its own computation gives the frequencies that ours plans."""
    scope = functions(
        "models/llama.py",
        "_rope_scaling_as_dict",
        "_compute_config_rope_inv_freq",
        "_vanilla_inv_freq_from_config",
        _get_rope_theta=theta,
        contextlib=__import__("contextlib"),
        logger=SimpleNamespace(warning_once=pytest.fail),
    )
    config = extend_context(make_llama().config, TARGET, rope)
    theirs, scaling = scope["_compute_config_rope_inv_freq"](config, config.rope_parameters)
    ours, attention = inverse_frequencies(config.rope_parameters, 16)
    torch.testing.assert_close(theirs.double(), torch.tensor(ours), rtol=1e-6, atol=0)
    assert scaling == pytest.approx(attention)


@pytest.mark.parametrize(
    "positions, borders",
    [
        ([0, 1, 2, 300, 301], None),
        ([0, 1, 300, 0, 400, 401], [0, 3, 6]),
        ([0, 9, 10, 0, 1, 0], [0, 3, 5, 6]),
    ],
)
def test_it_finds_packed_documents_at_zero(positions, borders):
    """A jump opens no document there; a restart at 0, as every packed document of ours has it, does."""
    scope = functions("utils/packing.py", "_varlen_from_position_ids", _seq_idx_from_cu_seqlens=lambda cu, total: cu)
    found = scope["_varlen_from_position_ids"](torch.tensor([positions]))
    assert (None if found is None else found.tolist()) == borders
