"""What would go wrong silently raises an error before anything changes; saved contexts are written whole."""

from __future__ import annotations

import json
import os
import stat
import struct

import pytest
import torch
from peft import get_peft_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, StaticCache

from pose_plugin.beacon import BeaconCache, condensing, files
from pose_plugin.utils.errors import PoSEError
from tests.models import make_base, make_beacon, make_config, make_ids

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return make_beacon()


IDS = {
    # 64 is the id of a beacon inside the model.
    "the beacon's id": (torch.tensor([[3] * 12 + [64]]), "64 is not in the model's vocabulary"),
    "a negative id": (torch.tensor([[3] * 12, [-1] * 12]), "-1 is not in the model's vocabulary"),
    "no token": (make_ids(0), r"shape \(1, 0\)"),
    "no row": (make_ids(5)[:0], r"shape \(0, 5\)"),
}


@pytest.mark.parametrize("name", IDS)
def test_ids_that_cannot_be_read(model, name):
    given, message = IDS[name]
    cache = model.condense(make_ids(20))
    for read in (model.condense, lambda ids: model(ids, past_key_values=cache)):
        with pytest.raises(PoSEError, match=message):
            read(given)
    assert cache.tokens == 20


def test_ids_as_tokenizers_give_them(model):
    ids = make_ids(20)
    assert model.condense(ids[0]).tokens == model.condense(ids.int()).tokens == 20
    with torch.no_grad():
        assert torch.equal(model(ids.int()).logits, model(ids).logits)
    mask = torch.ones_like(ids)
    for given, seen in ((ids[0], mask[0]), (ids[0], mask), (ids, mask)):
        assert model.condense(given, seen).tokens == 20


@pytest.mark.parametrize(
    ("shape", "advice"), [((20,), r"\(20,\)\. Give one row per text"), ((1, 1, 20, 20), "Packed documents")]
)
def test_a_mask_of_other_dimensions(model, shape, advice):
    with pytest.raises(PoSEError, match=advice):
        model.condense(make_ids(20), torch.ones(shape, dtype=torch.long))


WRONG = [
    ({"ratio": "8"}, "ratio: '8'"),
    ({"ratio": 8.0}, "ratio: 8.0"),
    ({"ratios": "248"}, r"ratios\[0\]: '2'"),
    ({"ratio": 4, "ratios": [4, 4]}, "ratio: give either ratio or ratios"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_ratios(model, changes, message):
    for read in (model.condense, model.generate, make_beacon().train()):  # in training, "8" could pass for "random"
        with pytest.raises(PoSEError, match=message):
            read(make_ids(20), **changes)


@pytest.mark.parametrize("key", ["labels", "shift_labels"])
def test_labels_of_another_shape(model, key):
    with pytest.raises(PoSEError, match=r"labels: shape \(1, 7\)"):
        model(make_ids(20), fused_lm_head=True, **{key: make_ids(7)})


@pytest.mark.parametrize("share", [float("nan"), 1.0, 8])
def test_no_compression_ratio(model, share):
    with pytest.raises(PoSEError, match=f"compression_ratio: {share}"), condensing(model, compression_ratio=share):
        pass


@pytest.mark.parametrize("layout", ["v1", "v2"])
@torch.no_grad()
def test_a_reading_that_fails_leaves_the_cache_as_it_was(layout, monkeypatch):
    """Out of memory or Ctrl-C, two intervals later."""
    model, ids = make_beacon(layout=layout), make_ids(44)
    cache = model.condense(ids[:, :13])
    expected = model(ids[:, 13:], past_key_values=cache.copy()).logits
    before, forward, calls = repr(cache), model.base_model.model.forward, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.base_model.model, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 13:], past_key_values=cache)
    monkeypatch.undo()
    assert (len(calls), repr(cache)) == (3, before)
    assert torch.equal(model(ids[:, 13:], past_key_values=cache).logits, expected)


def test_other_caches(model):
    """Empty ones are replaced; one with tokens is refused; the model's own cache_implementation is ignored."""
    ids = make_ids(20)
    expected = model.generate(ids, max_new_tokens=3, **GREEDY)
    for empty in (DynamicCache(), StaticCache(config=model.config, max_cache_len=64)):
        assert torch.equal(model.generate(ids, past_key_values=empty, max_new_tokens=3, **GREEDY), expected)
    used = DynamicCache()
    make_base()(ids[:, :4], past_key_values=used, use_cache=True)
    for key in ("past_key_values", "context"):
        with pytest.raises(PoSEError, match="a DynamicCache with 4 tokens"):
            model.generate(ids, max_new_tokens=3, **{key: used})
    with pytest.raises(PoSEError, match="a DynamicCache with 4 tokens"):
        model.condense(ids, context=used)
    with pytest.raises(ValueError, match="cache_implementation"):  # of transformers
        model.generate(ids, max_new_tokens=3, cache_implementation="static")
    own = model.base_model.model.generation_config
    own.cache_implementation = "static"
    try:
        assert torch.equal(model.generate(ids, max_new_tokens=3, **GREEDY), expected)
        assert own.cache_implementation == "static"
    finally:
        own.cache_implementation = None


def test_ways_to_generate_that_are_refused(model):
    with pytest.raises(PoSEError, match="generate_batch: continuous batching"):
        model.generate_batch([[3, 4]])
    embedded = model.get_base_model().get_input_embeddings()(make_ids(5)).detach()
    with pytest.raises(PoSEError, match="inputs: None"):
        model.generate(inputs_embeds=embedded, context=model.condense(make_ids(9)), max_new_tokens=2)


# Files.


def test_paths_that_are_not_regular_files(model, tmp_path):
    context = model.condense(make_ids(20))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(PoSEError, match="not a regular file"):
            context.save(path)
    for path in (tmp_path / "none" / "c.safetensors", tmp_path / ("x" * 300)):
        with pytest.raises(OSError):
            context.save(path)
    assert os.listdir(tmp_path) == ["pipe"]
    with pytest.raises(PoSEError, match="cache: it is empty"):
        BeaconCache().save(tmp_path / "c")


@pytest.mark.parametrize("error", [OSError, SafetensorError, KeyboardInterrupt])
def test_an_interrupted_save_leaves_the_old_file(model, tmp_path, monkeypatch, error):
    context, path = model.condense(make_ids(20)), tmp_path / "c.safetensors"

    def partial(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(b"part")
        raise error("disk full")

    for there in (False, True):
        if there:
            context.save(path)
        with monkeypatch.context() as patch:
            patch.setattr(files, "save_file", partial)
            with pytest.raises(error):
                context.save(path)
        assert os.listdir(tmp_path) == (["c.safetensors"] if there else [])
    assert BeaconCache.load(path).tokens == 20


def test_a_saved_context_has_the_mode_of_other_files(model, tmp_path):
    path = tmp_path / "c.safetensors"
    (tmp_path / "like").touch()
    model.condense(make_ids(20)).save(path)
    assert path.stat().st_mode == (tmp_path / "like").stat().st_mode
    path.chmod(0o640)
    model.condense(make_ids(30)).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and BeaconCache.load(path).tokens == 30


def test_saving_through_a_link_keeps_the_link(model, tmp_path):
    for name in ("there", "new"):
        (tmp_path / f"to-{name}").symlink_to(name)
    (tmp_path / "there").touch()
    for name in ("there", "new"):
        model.condense(make_ids(20)).save(tmp_path / f"to-{name}")
        assert (tmp_path / f"to-{name}").is_symlink() and BeaconCache.load(tmp_path / name).tokens == 20
    assert len(os.listdir(tmp_path)) == 4


def edit(path, change) -> None:
    """Change the description in a file; its tensors stay."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    state = json.loads(header["__metadata__"]["beacon"])
    change(state)
    header["__metadata__"]["beacon"] = json.dumps(state)
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + content[8 + size :])


DAMAGE = {
    "tokens": (lambda state: state.update(tokens=29), "tokens=29"),
    "tail": (lambda state: state.update(tail=[-1] * 7, tokens=31), "6 rows|7 rows"),
    "beacons in the tail": (lambda state: state.update(tail=[-1, 1, -1, -1, -1, -1, -1]), "tail is not that"),
    "another ratio": (lambda state: state.update(ratios=[4, 4, 2]), "rows of keys"),
    "ratio 0": (lambda state: state.update(ratios=[4, 4, 0]), r"ratios\.2"),
    "a ratio that does not divide": (lambda state: state.update(ratios=[4, 4, 3]), "ratio 3"),
    "open ratio 0": (lambda state: state.update(open_ratio=0), "open_ratio"),
    "no list": (lambda state: state.update(ratios={"a": 1}), "ratios"),
    "no tokens": (lambda state: state.pop("tokens"), "tokens"),
    "interval 0": (lambda state: state["signature"].update(interval=0), r"signature\.interval"),
    "more layers": (lambda state: state["signature"].update(layers=3), "missing"),
    "fewer layers": (lambda state: state["signature"].update(layers=1), "unknown"),
    "another layout": (lambda state: state["signature"].update(layout="v9"), r"signature\.layout"),
    "another size": (lambda state: state["signature"].update(hidden_size=31), "adapter"),
    "many raw tokens": (lambda state: state.update(ratios=[], tail=[-1] * 30), "missing|unknown|rows"),
    "no signature": (lambda state: state.update(signature=None), "signature"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_description_that_does_not_match(model, tmp_path, name):
    change, message = DAMAGE[name]
    path = tmp_path / "c.safetensors"
    model.condense(make_ids(30)).save(path)
    edit(path, lambda state: None)
    assert BeaconCache.load(path).tokens == 30
    edit(path, change)
    with pytest.raises(PoSEError, match=rf"c\.safetensors does not hold the tensors .*({message})"):
        BeaconCache.load(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format": "pose_plugin.beacon/1", "tail": ' + "[" * 100_000, "{", "7"]
)
def test_a_description_that_is_not_json(model, tmp_path, text):
    """Deeply nested JSON would end in a RecursionError."""
    path = tmp_path / "c.safetensors"
    model.condense(make_ids(30)).save(path)
    save_file(load_file(path), path, metadata={"beacon": text})
    with pytest.raises(PoSEError, match=r"c\.safetensors does not hold"):
        BeaconCache.load(path)


TENSORS = {
    "NaN keys": (lambda t: t["memory.0.keys"].fill_(float("nan")), r"memory\.0\.keys holds values"),
    "infinite values": (lambda t: t["open.1.values"].fill_(float("inf")), r"open\.1\.values holds values"),
    "whole numbers": (lambda t: t.update({"open.0.keys": t["open.0.keys"].long()}), r"open\.0\.keys holds values"),
    "another batch": (lambda t: t.update({"open.0.keys": t["open.0.keys"].repeat(2, 1, 1, 1)}), "batch sizes"),
    "one dimension less": (lambda t: t.update({"open.0.keys": t["open.0.keys"][0]}), "shape"),
    "a text of another length": (lambda t: t.update(text=make_ids(29)), "text"),
    "a digest of another type": (lambda t: t.update(digest=torch.zeros(1)), "digest"),
    "one more": (lambda t: t.update(more=torch.zeros(1)), "unknown"),
    "one less": (lambda t: t.pop("adapter"), "missing"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_match(model, tmp_path, name):
    change, message = TENSORS[name]
    path = tmp_path / "c.safetensors"
    model.condense(make_ids(30)).save(path)
    with safe_open(path, framework="pt") as opened:
        description, tensors = opened.metadata(), load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=description)
    with pytest.raises(PoSEError, match=rf"c\.safetensors does not hold .*{message}"):
        BeaconCache.load(path)


@torch.no_grad()
def test_keys_of_other_heads(model, tmp_path):
    """The description names no heads; the model notices when it reads on."""
    path = tmp_path / "c.safetensors"
    model.condense(make_ids(30)).save(path)
    with safe_open(path, framework="pt") as opened:
        description, tensors = opened.metadata(), load_file(path)
    halved = {name: t if t.dim() != 4 else t[:, :1].contiguous() for name, t in tensors.items()}
    save_file(halved, path, metadata=description)
    with pytest.raises(PoSEError, match=r"cache: layer 0 holds .*\(1, 1, 6, 8\)"):
        model(make_ids(3), context=BeaconCache.load(path))


def test_cut_files_and_other_files(model, tmp_path):
    path = tmp_path / "c.safetensors"
    model.condense(make_ids(30)).save(path)
    content = path.read_bytes()
    for size in (0, 8, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:size])
        with pytest.raises(PoSEError, match="cut is not a whole safetensors file"):
            BeaconCache.load(tmp_path / "cut")
    model.save_pretrained(tmp_path)
    with pytest.raises(PoSEError, match="has format None"):
        BeaconCache.load(tmp_path / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"interval": 4}, "made with interval=8, but this model reads with interval=4"),
        ({"mask": "full"}, "made with mask=stepwise"),
        ({"layout": "v2"}, "made with layout=v1"),
    ],
)
def test_a_file_of_another_adapter(model, tmp_path, other, message):
    model.condense(make_ids(20)).save(tmp_path / "c")
    context = BeaconCache.load(tmp_path / "c")
    with pytest.raises(PoSEError, match=message):
        make_beacon(**other).generate(make_ids(3), context=context, max_new_tokens=2)


def test_a_file_of_another_rope(model, tmp_path):
    """The base was extended in between: the same weights, but the memory's keys were rotated by other angles."""
    model.condense(make_ids(20)).save(tmp_path / "c")
    context = BeaconCache.load(tmp_path / "c")
    with pytest.raises(PoSEError, match="made with another RoPE, whose lowest frequency"):
        make_beacon(rope="linear").generate(make_ids(3), context=context, max_new_tokens=2)
    assert make_beacon().generate(make_ids(3), context=context, max_new_tokens=2).shape == (1, 5)


def test_a_file_of_another_model(model, tmp_path):
    """Another size shows in the signature; a model of the same size shows in the beacon's embedding."""
    model.condense(make_ids(20)).save(tmp_path / "c")
    wide = get_peft_model(make_base(hidden_size=64, num_hidden_layers=3), make_config())
    with pytest.raises(PoSEError, match="made with layers=2, hidden_size=32"):
        wide.generate(make_ids(3), context=BeaconCache.load(tmp_path / "c"), max_new_tokens=2)
    base = make_base()
    base.get_input_embeddings().weight.data.roll(1, 0)
    base.get_input_embeddings().weight.data += 0.1
    with pytest.raises(PoSEError, match="another adapter condensed it"):
        get_peft_model(base, make_config()).generate(
            make_ids(3), context=BeaconCache.load(tmp_path / "c"), max_new_tokens=2
        )
