"""What is given wrongly is told before anything is read or written, and nothing is lost by it."""

from __future__ import annotations

import json
import os
import stat
import struct

import pytest
import torch
from safetensors import SafetensorError
from transformers import DynamicCache, GenerationConfig, StaticCache

from pose_plugin.beacon import BeaconCache, cache, condensing
from pose_plugin.utils.errors import PoSEError
from tests.beacon.tiny import make_base, make_beacon, make_ids

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return make_beacon()


NO_IDS = {
    "a text": ("a", r"input_ids: str is no tensor.*tokenizer\(text"),
    "a list": ([[1, 2]], r"input_ids: list is no tensor of shape \(batch, tokens\); give torch.tensor\(ids\)"),
    "an encoding": ({"input_ids": make_ids(3)}, r"dict is no tensor.*encoding\['input_ids'\]"),
    "floats": (torch.rand(1, 5), r"torch.float32 holds no token ids; give ids.long\(\)"),
    "bytes": (torch.ones(1, 5, dtype=torch.uint8), "torch.uint8 holds no token ids"),
    "three dimensions": (make_ids(5)[None], r"shape \(1, 1, 5\) must be \(batch, tokens\)"),
    "no token": (make_ids(0), r"shape \(1, 0\) holds no token"),
    "no row": (make_ids(5)[:0], r"shape \(0, 5\) holds no token"),
    # 64 is the id that stands for a beacon inside.
    "the beacon's id": (
        torch.tensor([[3] * 12 + [64]]),
        r"input_ids: 64 \(row 0, token 12\) is not in the model's vocabulary of 64, 0…63.*resize_token_embeddings",
    ),
    "a negative id": (torch.tensor([[3] * 12, [-1] * 12]), r"input_ids: -1 \(row 1, token 0\) is not in"),
    "another device": (make_ids(5).to("meta"), r"input: on meta, the model on cpu; give it .to\(model.device\)"),
}


@pytest.mark.parametrize("name", NO_IDS)
def test_no_token_ids(model, name):
    given, message = NO_IDS[name]
    cache = model.condense(make_ids(20))
    for read in (
        model.condense,
        lambda ids: model.generate(ids, cache=cache, max_new_tokens=2),
        lambda ids: model(ids, past_key_values=cache),
    ):
        with pytest.raises(PoSEError, match=message):
            read(given)
    assert cache.tokens == 20


def test_ids_as_tokenizers_give_them(model):
    ids = make_ids(20)
    assert model.condense(ids[0]).tokens == model.condense(ids.int()).tokens == 20
    with torch.no_grad():
        assert torch.equal(model(ids.int()).logits, model(ids).logits)
    with pytest.raises(PoSEError, match="input_ids: None"):
        model.condense(None)


WRONG = [
    ({"ratio": "8"}, "ratio: '8' is not known; give 'adapt' or a whole number ≥ 2 that divides the interval of 8"),
    ({"ratio": 8.0}, "ratio: 8.0 must be a whole number"),
    ({"ratios": 4}, "ratios: 4 must be a list, one ratio for each interval"),
    ({"ratios": "248"}, "ratios: '248' must be a list"),
    ({"ratio": 4, "ratios": [4, 4]}, r"give either ratio or ratios"),
    ({"cache": "a"}, r"cache: str is no BeaconCache; give model.condense\(ids\)"),
    ({"cache": DynamicCache()}, "cache: DynamicCache is no BeaconCache"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_arguments(model, changes, message):
    for read in (model.condense, model.generate):
        with pytest.raises(PoSEError, match=message):
            read(make_ids(20), **changes)
    if "ratio" in changes or "ratios" in changes:
        with pytest.raises(PoSEError, match=message):
            model.train()(make_ids(20), **changes)  # "8" would be taken for "random"
        model.eval()


FORWARD = [
    ({"past_key_values": "a"}, "past_key_values: str is no BeaconCache"),
    ({"labels": make_ids(7)}, r"labels: \(1, 7\) must be a tensor of the input's shape \(1, 20\)"),
    ({"labels": "a"}, "labels: str must be a tensor"),
    ({"shift_labels": make_ids(7)}, r"shift_labels: \(1, 7\) must be"),
    ({"logits_to_keep": -1}, "logits_to_keep: -1 must be 0"),
    ({"headroom": 1.5}, "headroom: 1.5 must be a whole number of tokens"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(20, 32)}, r"inputs_embeds: \(20, 32\) must be floats of shape"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(1, 20, 31)}, r"\(1, 20, 31\) must be .*\(batch, tokens, 32\)"),
    ({"input_ids": None, "inputs_embeds": make_ids(32)[None]}, "must be floats"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(1, 0, 32)}, r"shape \(1, 0, 32\) holds no token"),
]


@pytest.mark.parametrize(("changes", "message"), FORWARD)
def test_wrong_arguments_of_forward(model, changes, message):
    with pytest.raises(PoSEError, match=message):
        model(**{"input_ids": make_ids(20), **changes})


@pytest.mark.parametrize("share", ["a", True, float("nan"), 1.0])
def test_no_compression_ratio(model, share):
    with pytest.raises(PoSEError, match="must lie between 0 and 1"), condensing(model, compression_ratio=share):
        pass


@pytest.mark.parametrize("layout", ["v1", "v2"])
@torch.no_grad()
def test_a_reading_that_fails_leaves_the_cache_as_it_was(layout, monkeypatch):
    """Out of memory, or Ctrl-C, two intervals on; or a window that is full only then."""
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


def test_settings_of_another_cache(model):
    """Of the call they are refused; what a model's own generation config says is not the caller's word."""
    ids = make_ids(20)
    for how in (
        {"cache_implementation": "static"},
        {"generation_config": GenerationConfig(cache_implementation="static")},
    ):
        with pytest.raises(PoSEError, match="cache_implementation: 'static' cannot go with beacons"):
            model.generate(ids, max_new_tokens=3, **how)
    expected = model.generate(ids, max_new_tokens=3, **GREEDY)
    for empty in (DynamicCache(), StaticCache(config=model.config, max_cache_len=64)):
        assert torch.equal(model.generate(ids, past_key_values=empty, max_new_tokens=3, **GREEDY), expected)
    used = DynamicCache()
    make_base()(ids[:, :4], past_key_values=used, use_cache=True)
    with pytest.raises(PoSEError, match="a DynamicCache with 4 tokens cannot be continued"):
        model.generate(ids, past_key_values=used, max_new_tokens=3)
    own = model.base_model.model.generation_config
    own.cache_implementation = "static"
    try:
        assert torch.equal(model.generate(ids, max_new_tokens=3, **GREEDY), expected)
        assert own.cache_implementation == "static"
    finally:
        own.cache_implementation = None


def test_ways_to_generate_that_cannot_be(model):
    with pytest.raises(PoSEError, match="generate_batch: continuous batching"):
        model.generate_batch([[3, 4]])
    with pytest.raises(PoSEError, match="assistant_model: it is the model itself"):
        model.generate(make_ids(20), assistant_model=model, max_new_tokens=2)
    with pytest.raises(PoSEError, match="past_key_values: str is no BeaconCache"):
        model.generate(make_ids(20), past_key_values="a", max_new_tokens=2)
    embedded = model.get_base_model().get_input_embeddings()(make_ids(5)).detach()
    with pytest.raises(PoSEError, match=r"inputs: None; with cache=… give the token ids"):
        model.generate(inputs_embeds=embedded, cache=model.condense(make_ids(9)), max_new_tokens=2)


# Files.


def places(folder):
    os.mkfifo(folder / "pipe")
    (folder / "text").write_text("kept")
    return {
        None: "None is no name of a file",
        5: "5 is no name of a file",
        "": "'' is no name of a file",
        "a\0b": "is no name of a file",
        folder: "is a folder; give the name of a file",
        folder / "none" / "c.safetensors": "there is no folder .*none; make it first",
        folder / "text" / "c": "there is no folder",
        folder / ("x" * 300): "cannot be written .*too long.*; nothing was changed there",
        folder / "pipe": "is no ordinary file",
    }


def test_places_that_no_file_can_have(model, tmp_path):
    context = model.condense(make_ids(20))
    for path, message in places(tmp_path).items():
        with pytest.raises(PoSEError, match=message):
            context.save(path)
    assert sorted(os.listdir(tmp_path)) == ["pipe", "text"] and (tmp_path / "text").read_text() == "kept"
    for path in (None, "", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(PoSEError, match=r"no name of a file|is a folder|cannot be read"):
            BeaconCache.load(path)


@pytest.mark.parametrize("error", [OSError, SafetensorError, KeyboardInterrupt])
def test_half_a_file_is_never_left(model, tmp_path, monkeypatch, error):
    """Neither under its name nor beside it; what was there stays, its mode too."""
    context, path = model.condense(make_ids(20)), tmp_path / "c.safetensors"

    def half(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(b"half")
        raise error("disk full")

    for there in (False, True):
        if there:
            context.save(path)
        with monkeypatch.context() as patch:
            patch.setattr(cache, "save_file", half)
            expected = KeyboardInterrupt if error is KeyboardInterrupt else PoSEError
            with pytest.raises(expected):
                context.save(path)
        assert os.listdir(tmp_path) == (["c.safetensors"] if there else [])
    assert BeaconCache.load(path).tokens == 20


def test_others_may_read_a_context(model, tmp_path):
    path = tmp_path / "c.safetensors"
    (tmp_path / "like").touch()
    model.condense(make_ids(20)).save(path)
    assert path.stat().st_mode == (tmp_path / "like").stat().st_mode
    path.chmod(0o640)
    model.condense(make_ids(30)).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and BeaconCache.load(path).tokens == 30


def test_a_link_stays_one(model, tmp_path):
    """Of /dev/stdout root would make a file otherwise."""
    for name in ("there", "new"):
        (tmp_path / f"to-{name}").symlink_to(name)
    (tmp_path / "there").touch()
    for name in ("there", "new"):
        model.condense(make_ids(20)).save(tmp_path / f"to-{name}")
        assert (tmp_path / f"to-{name}").is_symlink() and BeaconCache.load(tmp_path / name).tokens == 20
    assert len(os.listdir(tmp_path)) == 4


def edited(path, change) -> None:
    """Changes what a file says of itself; its tensors stay."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    state = json.loads(header["__metadata__"]["beacon"])
    change(state)
    header["__metadata__"]["beacon"] = json.dumps(state)
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + content[8 + size :])


DAMAGE = [
    lambda state: state.pop("tokens"),
    lambda state: state.update(tokens=29),
    lambda state: state.update(tail=[-1] * 7, tokens=31),
    lambda state: state.update(ratios=[4, 4, 2]),
    lambda state: state.update(signature={}),
    lambda state: state["signature"].update(layers=3),
    lambda state: state.update(tail=None),
]


@pytest.mark.parametrize("change", DAMAGE)
def test_a_file_that_is_not_what_it_says(model, tmp_path, change):
    path = tmp_path / "c.safetensors"
    model.condense(make_ids(30)).save(path)
    edited(path, lambda state: None)
    assert BeaconCache.load(path).tokens == 30
    edited(path, change)
    with pytest.raises(PoSEError, match=r"what .* says of itself is not what it holds .* condense the text again"):
        BeaconCache.load(path)


def test_cut_files_and_other_files(model, tmp_path):
    path = tmp_path / "c.safetensors"
    model.condense(make_ids(30)).save(path)
    content = path.read_bytes()
    for size in (0, 8, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:size])
        with pytest.raises(PoSEError, match=r"cut cannot be read .*; write it with cache.save"):
            BeaconCache.load(tmp_path / "cut")
    model.save_pretrained(tmp_path)
    with pytest.raises(PoSEError, match=r"adapter_model.safetensors holds format None, not pose_plugin.beacon/1: no"):
        BeaconCache.load(tmp_path / "adapter_model.safetensors")
    for device in ("xyz", "cuda:99"):
        with pytest.raises(PoSEError, match=f"device: '{device}' cannot be used here"):
            BeaconCache.load(path, device)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"interval": 4}, "made with interval=8, but this model reads with interval=4"),
        ({"mask": "full"}, "made with mask=stepwise, but this model reads with mask=full"),
        ({"layout": "v2"}, "made with layout=v1"),
    ],
)
def test_a_file_of_another_adapter(model, tmp_path, other, message):
    model.condense(make_ids(20)).save(tmp_path / "c")
    context = BeaconCache.load(tmp_path / "c")
    with pytest.raises(PoSEError, match=message):
        make_beacon(**other).generate(make_ids(3), cache=context, max_new_tokens=2)


def test_a_file_of_another_model(model, tmp_path):
    """Another size is told by the size; one of the same size by the beacon's embedding."""
    from peft import get_peft_model

    from tests.beacon.tiny import make_config

    model.condense(make_ids(20)).save(tmp_path / "c")
    wide = get_peft_model(make_base(hidden_size=64, num_hidden_layers=3), make_config())
    with pytest.raises(PoSEError, match="made with layers=2, hidden_size=32, but this model reads with layers=3"):
        wide.generate(make_ids(3), cache=BeaconCache.load(tmp_path / "c"), max_new_tokens=2)
    base = make_base()
    base.get_input_embeddings().weight.data.roll(1, 0)
    base.get_input_embeddings().weight.data += 0.1
    with pytest.raises(PoSEError, match="another adapter condensed it"):
        get_peft_model(base, make_config()).generate(
            make_ids(3), cache=BeaconCache.load(tmp_path / "c"), max_new_tokens=2
        )
