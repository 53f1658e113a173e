"""Raw tokens that stay: the overlap (the last of each condensed interval) and the sinks (the first of the text)."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from pose_plugin.beacon import BeaconCache, BeaconConfig
from pose_plugin.beacon.layout import RAW, Scheme, lay_out, moves, overlapping, positions, visible
from pose_plugin.beacon.ratios import BeaconWindow, adapt, fits
from pose_plugin.utils.errors import PoSEError
from tests.models import BEACON_ROPES, make_base, make_beacon, make_ids

R = RAW
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LAYOUTS = pytest.mark.parametrize("layout", ["v1", "v2"])
KEPT = pytest.mark.parametrize("kept", [{"overlap": 3}, {"sinks": 2}, {"overlap": 3, "sinks": 2}], ids=str)


def test_tables_by_hand():
    """Interval 4, ratio 2, memory of 2, overlap of 2: the interval's rows are behind four others."""
    given = lay_out(2, (), 4, Scheme(4, overlap=2), ratio=2, closing=True, overlap=2)
    assert given.rows == (R, R, R, R, 1, 2)
    assert positions(given) == [4, 5, 6, 7, 6, 8]
    seen = ["".join("#" if each else "." for each in row) for row in visible(given).tolist()]
    assert seen == ["#####.....", "######....", "#######...", "########..", "######..#.", "########.#"]
    # Beacons go to slots 2 and 3, the last two tokens from 6 and 7 to the positions behind them, 4 and 5.
    assert moves(given) == ([4, 5], [2 - 6, 3 - 8])
    assert overlapping(given) == ([2, 3], [4 - 6, 5 - 7])
    alone = lay_out(2, (), 4, Scheme(4, attend_previous=False, overlap=2), ratio=2, closing=True, overlap=2)
    assert [row[:4].any().item() for row in visible(alone)] == [True] * 4 + [False] * 2


def test_tables_of_the_first_interval_and_of_parts():
    first = lay_out(0, (), 4, Scheme(4, overlap=2), ratio=2, closing=True)
    assert positions(first) == [0, 1, 2, 3, 2, 4]
    assert overlapping(first) == ([2, 3], [2 - 2, 3 - 3])
    # Three tokens of this interval are cached already.
    part = lay_out(2, (R, R, R), 1, Scheme(4, overlap=2), ratio=2, closing=True, overlap=2)
    assert positions(part) == [7, 6, 8]
    assert overlapping(part) == ([2, 3], [-2, -2])
    assert overlapping(lay_out(2, (), 4, Scheme(4), ratio=2, closing=True)) == ([], [])


def test_tables_of_interleaved_rows():
    given = lay_out(1, (), 4, Scheme(4, interleaved=True, overlap=2), ratio=2, closing=True, overlap=2)
    assert given.rows == (R, R, 1, R, R, 2)
    assert positions(given) == [3, 4, 5, 6, 7, 8]
    assert moves(given) == ([2, 5], [1 - 5, 2 - 8])
    assert overlapping(given) == ([3, 4], [3 - 6, 4 - 7])


def test_tables_of_sinks():
    """Interval 4, ratio 2, one sink: it stays at 0, beacons go behind it, and only the first interval has it."""
    first = lay_out(0, (), 4, Scheme(4, sinks=1, overlap=2), ratio=2, closing=True)
    assert moves(first) == ([0, 4, 5], [0, 1 - 2, 2 - 4])
    assert overlapping(first) == ([2, 3], [3 - 2, 4 - 3])
    second = lay_out(3, (), 4, Scheme(4, sinks=1, overlap=2), ratio=2, closing=True, overlap=2)
    assert moves(second) == moves(lay_out(3, (), 4, Scheme(4, overlap=2), ratio=2, closing=True, overlap=2))
    mixed = lay_out(0, (), 4, Scheme(4, interleaved=True, sinks=3), ratio=2, closing=True)
    assert mixed.rows == (R, R, 1, R, R, 2)
    # The third token is behind the first beacon, and goes before it.
    assert moves(mixed) == ([0, 1, 3, 2, 5], [0, 0, 2 - 3, 3 - 2, 4 - 5])
    assert BeaconWindow(64, 4, sinks=3).after(0, 2) == 5 and BeaconWindow(64, 4, sinks=3).after(5, 2) == 7


def test_fit_to_the_position():
    """m + t + l ≤ L − 1 before an interval that condenses, m + t + n ≤ L for the last. L = 13, l = 4, t = 2."""
    window = BeaconWindow(13, 4, overlap=2)
    assert fits(window, [2, 2, 2, 2], 3)  # m = 6: 6 + 2 + 4 ≤ 12, then 8 + 2 + 3 ≤ 13
    assert not fits(window, [2, 2, 2, 2], 4)
    assert not fits(BeaconWindow(12, 4, overlap=2), [2, 2, 2, 2], 1)
    assert fits(BeaconWindow(7, 4, overlap=4), [4], 2)  # no overlap before the first interval: 4 ≤ 6, 1 + 4 + 2 ≤ 7
    assert not fits(BeaconWindow(7, 4, overlap=4), [4], 3)
    llama = BeaconWindow(4096, 1024, overlap=64)
    assert llama.capacity(8) == 24 * 1024 + 960  # 24 · 128 beacons, 64 and 960 tokens
    assert adapt(llama, llama.capacity(8), headroom=0) == 8
    assert adapt(llama, llama.capacity(8) + 1, headroom=0) == 16


@KEPT
@LAYOUTS
@torch.no_grad()
def test_the_cache_never_exceeds_the_window(layout, kept):
    model = make_beacon(layout=layout, window=32, interval=16, ratios=[2, 4, 8, 16], ratio=16, **kept)
    cache, rows = BeaconCache(), []
    ids = make_ids(16 * 11)
    for start in range(0, ids.shape[1], 13):
        model(ids[:, start : start + 13], past_key_values=cache, logits_to_keep=1)
        rows.append(cache.len_memory + cache.len_overlap + cache.len_tail)
        assert cache.nbytes() == rows[-1] * 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, fp32
    assert max(rows) <= 32
    assert cache.len_memory == kept.get("sinks", 0) + len(cache.ratios)
    with pytest.raises(PoSEError, match="window: 32 positions are full"):
        model(make_ids(80), past_key_values=cache)


def assert_the_bases_rows(found, rope, ids, places, bound):
    """Compare keys and values of each given layer, (keys, values), with those that the base makes of ids."""
    output = make_base(rope=rope)(ids, position_ids=torch.arange(*places)[None], use_cache=True)
    layers = output.get("past_key_values", output.get("cache")).layers
    for (keys, values), layer in zip(found, layers, strict=False):
        assert (keys - layer.keys).abs().max() <= bound
        assert (values - layer.values).abs().max() <= bound


@pytest.mark.parametrize("rope", BEACON_ROPES)
@LAYOUTS
@torch.no_grad()
def test_overlapping_keys_are_the_bases_keys_behind_the_memory(rope, layout):
    """In the first layer, a key depends only on its token and its position."""
    ids = make_ids(45)
    cache = make_beacon(rope=rope, layout=layout, overlap=3).condense(ids)
    assert (cache.len_memory, cache.len_overlap, cache.pending) == (10, 3, 5)
    assert_the_bases_rows(cache.overlap[:1], rope, ids[:, 37:40], (10, 13), 2e-5)


@pytest.mark.parametrize("rope", BEACON_ROPES)
@LAYOUTS
@torch.no_grad()
def test_sinks_are_the_bases_first_keys(rope, layout):
    """In every layer, since no token of the first interval sees a beacon (interleaved: none before the first)."""
    ids = make_ids(45)
    cache = make_beacon(rope=rope, layout=layout, sinks=2).condense(ids)
    assert (cache.len_memory, cache.pending) == (2 + 10, 5)
    sinks = [(keys[:, :, :2], values[:, :, :2]) for keys, values in cache.pieces[0]]
    assert len(sinks) == 2
    assert_the_bases_rows(sinks, rope, ids[:, :2], (0, 2), 1e-5)


@KEPT
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@LAYOUTS
@torch.no_grad()
def test_cutting_the_input_changes_nothing(attention, layout, kept):
    ids = make_ids(26)
    model = make_beacon(attention=attention, layout=layout, **kept)
    whole = model(ids).logits
    for cuts in ([3], [8], [9, 16], range(1, 26)):
        cache = BeaconCache()
        parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise([0, *cuts, 26])]
        assert (torch.cat(parts, dim=1) - whole).abs().max() <= 1e-4
    without = make_beacon(attention=attention, layout=layout)(ids).logits
    assert torch.equal(without[:, :8], whole[:, :8])
    assert (without - whole)[:, 8:].abs().amin(0).amax(-1).min() > 1e-4  # every later token sees their effect


@KEPT
@LAYOUTS
def test_generate_equals_restreaming(layout, kept, tmp_path):
    """By prefix, in parts, from a saved context and with guesses that pass an interval's end."""
    model = make_beacon(layout=layout, window=40, **kept)
    ids = make_ids(50)
    expected, cache = ids, BeaconCache()
    with torch.no_grad():
        for at in range(50):
            logits = model(ids[:, at : at + 1], past_key_values=cache).logits
        for _ in range(12):
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
            logits = model(expected[:, -1:], past_key_values=cache).logits
    for how in ({}, {"prefill_chunk_size": 13}, {"use_cache": False}, {"prompt_lookup_num_tokens": 4}):
        assert torch.equal(model.generate(ids, max_new_tokens=12, **how, **GREEDY), expected)
    context = model.condense(ids[:, :44])
    context.save(tmp_path / "context.safetensors")
    loaded = BeaconCache.load(tmp_path / "context.safetensors")
    assert (loaded.len_overlap, loaded.len_memory) == (kept.get("overlap", 0), context.len_memory)
    for given in (context, loaded):
        assert torch.equal(model.generate(ids[:, 44:], context=given, max_new_tokens=12, **GREEDY), expected[:, 44:])


@KEPT
@LAYOUTS
@torch.no_grad()
def test_cropping_batches_and_leaving(layout, kept):
    model, ids = make_beacon(layout=layout, **kept), make_ids(40, rows=2)
    whole = model(ids).logits
    cache = model.condense(ids[:, :13])
    cache.undoes = True
    model(ids[:, 13:20], past_key_values=cache)
    cache.crop(-5)  # back before the second interval was condensed
    assert (model(ids[:, 15:], past_key_values=cache).logits - whole[:, 15:]).abs().max() <= 1e-4
    swapped = model.condense(ids[:, :20])
    swapped.reorder_cache(torch.tensor([1, 0]))
    assert (model(ids[[1, 0], 20:], past_key_values=swapped).logits - whole[[1, 0], 20:]).abs().max() <= 1e-4
    context = model.condense(ids[:, :21])
    past = context.to_dynamic_cache()
    assert past.get_seq_length() == context.len_memory + kept.get("overlap", 0) + context.len_tail
    read = make_base()(ids[:, 21:22], **{model.base_model.cache_key: past}, use_cache=True).logits
    assert torch.equal(read, model(ids[:, 21:22], context=context).logits)


@KEPT
@LAYOUTS
def test_checkpointing_changes_nothing(layout, kept):
    """Gradients flow through the overlap as well; training draws ratios that fit with what stays."""
    ids, results = make_ids(60), []
    for enabled in (False, True):
        model = make_beacon(layout=layout, window=32, ratios=[2, 4, 8], **kept).train()
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(ids, labels=ids).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@torch.no_grad()
def test_an_adapter_that_was_trained_without_overlap(tmp_path):
    """It reads with what its adapter_config.json names; files from before name nothing of it."""
    from peft import PeftModel

    make_beacon().save_pretrained(tmp_path)
    path, ids = tmp_path / "adapter_config.json", make_ids(30)
    config = json.loads(path.read_text())
    assert (config.pop("overlap"), config.pop("sinks")) == (0, 0)
    for changes in ({}, {"overlap": 3}, {"sinks": 2}):
        expected = make_beacon(**changes)
        path.write_text(json.dumps(config | changes))
        loaded = PeftModel.from_pretrained(make_base(), tmp_path).eval()
        assert torch.equal(loaded(ids).logits, expected(ids).logits)


def test_files_from_before_and_another_overlap(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path, ids = tmp_path / "old.safetensors", make_ids(9)
    make_beacon().condense(make_ids(45)).save(path)
    with safe_open(str(path), "pt") as file:
        state = json.loads(file.metadata()["beacon"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator
    assert (state["signature"].pop("overlap"), state["signature"].pop("sinks")) == (0, 0)
    del tensors["rope"]
    save_file(tensors, str(path), metadata={"beacon": json.dumps(state)})
    assert make_beacon()(ids, context=BeaconCache.load(path)).logits.shape[1] == 9
    with pytest.raises(PoSEError, match=r"overlap=0.*overlap=3"):
        make_beacon(overlap=3)(ids, context=BeaconCache.load(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap": -1}, "overlap: -1"),
        ({"overlap": 9}, "overlap: 9 .*interval of 8"),
        ({"sinks": 9}, "sinks: 9 .*interval of 8"),
        ({"overlap": 4, "window": 12}, "window: 12 must be a whole number ≥ 13"),
        ({"overlap": 2, "sinks": 2, "window": 12}, "window: 12 must be a whole number ≥ 13"),
    ],
)
def test_refused_values(changes, message):
    with pytest.raises(PoSEError, match=message):
        BeaconConfig(interval=8, **changes)
