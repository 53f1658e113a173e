"""Reading long texts: every architecture, attention implementation and kind of RoPE."""

from __future__ import annotations

import itertools

import pytest
import torch

from pose_plugin.beacon import BeaconCache
from pose_plugin.beacon.layout import RAW, Pass, Scheme, lay_out, visible
from pose_plugin.beacon.rope import rotate
from pose_plugin.utils.errors import PoSEError
from tests.models import ARCHITECTURES, BEACON_ROPES, make_base, make_beacon, make_config, make_ids

TABLE = [(architecture, attention) for architecture in ARCHITECTURES for attention in ("eager", "sdpa")]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize(("architecture", "attention"), TABLE)
@torch.no_grad()
def test_base_is_untouched(architecture, attention):
    """Short inputs and the disabled adapter are bit-equal. The first interval of a long input differs by rounding,
    since its products have another size: 2e-6 with AVX2 and nothing with AVX-512."""
    ids = make_ids(30)
    base = make_base(architecture, attention)
    short = [base(ids[:, :count]).logits for count in (1, 5, 8)]
    long = base(ids).logits
    model = make_beacon(architecture, attention)
    for count, expected in zip((1, 5, 8), short, strict=True):
        assert torch.equal(model(ids[:, :count]).logits, expected)
    read = model(ids).logits
    assert difference(read[:, :8], short[-1]) <= 2e-5
    assert difference(read[:, 8:], long[:, 8:]) > 0.01
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, long)
    assert torch.equal(model(ids).logits, read)


@pytest.mark.parametrize(("architecture", "attention"), TABLE)
@torch.no_grad()
def test_cutting_the_input_changes_nothing(architecture, attention):
    """Cut at an interval's end, within, and after each token."""
    ids = make_ids(26)
    model = make_beacon(architecture, attention)
    whole = model(ids)
    assert whole.logits.shape == (1, 26, 64)
    for cuts in ([3], [8], [9, 16], range(1, 26)):
        cache = BeaconCache()
        edges = [0, *cuts, 26]
        parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(edges)]
        assert difference(torch.cat(parts, dim=1), whole.logits) <= 1e-4
        assert (cache.tokens, cache.len_memory, cache.pending, cache.ratios) == (26, 6, 2, [4, 4, 4])


VARIANTS = [
    {"mask": "segmentation"},
    {"mask": "full"},
    {"attend_previous": False},
    {"layout": "v2"},
    {"rank": 4},
    {"target_modules": ["k_proj", "v_proj", "q_proj"]},
    {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
    {"layout": "v2", "rank": 2, "target_modules": ["k_proj", "v_proj", "up_proj"]},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(f"{k}={v[k]}" for k in v)[:40])
@torch.no_grad()
def test_variants_do_not_depend_on_cuts(variant):
    ids = make_ids(20)
    model = make_beacon(**variant)
    whole = model(ids).logits
    cache = BeaconCache()
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 8), (8, 17), (17, 20))]
    assert difference(torch.cat(parts, dim=1), whole) <= 1e-4
    assert difference(make_beacon()(ids).logits[:, 9:], whole[:, 9:]) > 1e-3  # and the variant is a variant


@pytest.mark.parametrize("rope", BEACON_ROPES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_each_kind_of_rope(rope, attention):
    ids = make_ids(26)
    base = make_base("llama", attention, rope)
    short = base(ids[:, :8]).logits
    model = make_beacon("llama", attention, rope)
    assert torch.equal(model(ids[:, :8]).logits, short)
    whole = model(ids).logits
    cache = BeaconCache()
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 11), (11, 26))]
    assert difference(torch.cat(parts, dim=1), whole) <= 1e-4


@pytest.mark.parametrize("rope", BEACON_ROPES)
@torch.no_grad()
def test_moved_keys_are_the_keys_of_the_new_place(rope):
    """Against the model's own rotation; a key of YaRN carries its attention factor once, before and after."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rotary = make_base("llama", rope=rope).model.rotary_emb
    keys = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    old, new = torch.tensor([100, 64, 7]), torch.tensor([3, 4, 5])

    def at(places):
        return apply_rotary_pos_emb(keys, keys, *rotary(keys, places[None]))[1]

    moved = rotate(at(old), new - old, rotary.inv_freq)
    assert difference(moved, at(new)) <= 2.3e-4
    if rope == "yarn":
        assert rotary.attention_scaling > 1.1
        scaled = rotate(at(old), new - old, rotary.inv_freq) * rotary.attention_scaling
        assert difference(scaled, at(new)) > 0.1  # what cos and sin with the factor would give
    else:
        assert rotary.attention_scaling == 1


OTHERS = {
    # rotates a part of each head; no layer, every layer, one of two layers
    "stablelm": ({"partial_rotary_factor": 0.5}, {0: True, 1: True}),
    "smollm3": ({"no_rope_layers": [1, 0]}, {0: True, 1: False}),
    "phi3": ({}, {0: True, 1: True}),  # one projection for q, k and v
    "mixtral": ({"num_local_experts": 2}, {0: True, 1: True}),
}


@pytest.mark.parametrize("architecture", OTHERS)
@torch.no_grad()
def test_other_architectures(architecture):
    """Each layer's rotation is measured, so that keys of layers without positions are not moved."""
    from peft import get_peft_model

    changes, rotating = OTHERS[architecture]
    ids = make_ids(26)
    base = make_base(architecture, **changes)
    short = base(ids[:, :8]).logits
    model = get_peft_model(base, make_config()).eval()
    assert torch.equal(model(ids[:, :8]).logits, short)
    whole = model(ids).logits
    cache = BeaconCache()
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 11), (11, 16), (16, 26))]
    assert difference(torch.cat(parts, dim=1), whole) <= 1e-4
    assert {layer: model.base_model.rotates(layer) for layer in rotating} == rotating


@torch.no_grad()
def test_the_rest_of_a_head_stays():
    """Partial rotary: the rest of each head is not moved."""
    keys = torch.randn(1, 1, 2, 8)
    moved = rotate(keys, torch.tensor([3, -2]), torch.tensor([1.0, 0.1]))
    assert torch.equal(moved[..., 4:], keys[..., 4:])
    assert difference(moved[..., :4], keys[..., :4]) > 0.1
    assert torch.allclose(rotate(moved, torch.tensor([-3, 2]), torch.tensor([1.0, 0.1])), keys, atol=1e-6)
    # Half precision is rounded once, at the end.
    low = keys.bfloat16()
    once = rotate(low.float(), torch.tensor([300, 7]), torch.tensor([1.0, 0.1])).bfloat16()
    assert torch.equal(rotate(low, torch.tensor([300, 7]), torch.tensor([1.0, 0.1])), once)


@pytest.mark.parametrize("mask, overlap, sinks",
                         [("stepwise", 0, 0), ("segmentation", 0, 0), ("full", 0, 0), ("stepwise", 3, 2)])  # fmt: skip
@torch.no_grad()
def test_stream_equals_one_pass_with_a_whole_mask(mask, overlap, sinks):
    """Without positions (frequencies 0), two intervals and a half are one forward under one hand-made mask."""
    model = make_beacon(mask=mask, attention="eager", overlap=overlap, sinks=sinks)
    tuner = model.base_model
    tuner.rotary.inv_freq.zero_()
    ids = make_ids(20)
    read = model(ids).logits

    rows = [RAW] * 8 + [1, 2] + [RAW] * 8 + [1, 2] + [RAW] * 4
    interval = torch.tensor([0] * 10 + [1] * 10 + [2] * 4)
    beacon = torch.tensor([row != RAW for row in rows])
    # Another interval's rows see its beacons and nothing else of it but the overlap, which only the next one sees, and
    # the text's first tokens.
    last = torch.tensor([8 - overlap <= at % 10 < 8 for at in range(len(rows))])
    seen = (interval[:, None] > interval[None]) & beacon[None]
    seen |= (interval[:, None] == interval[None] + 1) & last[None]
    seen |= (interval[:, None] > 0) & (torch.arange(len(rows)) < sinks)[None]
    own = visible(lay_out(0, (), 8, Scheme(8, mask), 4, closing=True))
    for start, size in ((0, 10), (10, 10), (20, 4)):
        seen[start : start + size, start : start + size] = own[:size, :size] if size == 10 else own[:4, :4]
    filled = torch.tensor([[tuner.embedding.sentinel if row != RAW else 0 for row in rows]])
    filled[0, ~beacon] = ids[0]
    tuner.router.given = given = Pass(0, (), tuple(rows), Scheme(8, interleaved=True), 4)

    class Constant:
        """The hook reads the pass from the cache; here there is none."""

        def __call__(self, module, args, kwargs):
            tuner.router.given = given

    hooks = [a.register_forward_pre_hook(Constant(), with_kwargs=True) for a in tuner._attentions]
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    once = tuner.model(filled, attention_mask=bias, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    assert difference(once[:, ~beacon], read) <= 1e-4


@pytest.mark.parametrize("rope", BEACON_ROPES)
@pytest.mark.parametrize(
    "changes", [{}, {"mask": "segmentation"}, {"mask": "full"}, {"layout": "v2"}], ids=["stepwise", "seg", "full", "v2"]
)
@torch.no_grad()
def test_memory_is_at_its_slots(rope, changes):
    """In the first layer, a beacon's key depends only on its position: in memory that is 0, 1, 2, …"""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    model = make_beacon("qwen3", rope=rope, **changes)
    cache = model.condense(make_ids(60), ratios=None if changes.get("layout") else [2, 8, 4, 2, 8, 4, 4])
    decoder = model.base_model.model.model
    attention = decoder.layers[0].self_attn
    hidden = decoder.layers[0].input_layernorm(model.base_model.embedding.row())
    key = attention.k_norm(attention.k_proj.beacon_proj["default"](hidden).view(1, 1, 2, 8)).transpose(1, 2)
    slots = key.expand(-1, -1, cache.len_memory, -1)
    cos, sin = decoder.rotary_emb(slots, torch.arange(cache.len_memory)[None])
    expected = apply_rotary_pos_emb(slots, slots, cos, sin)[1]
    assert cache.len_memory >= 14
    assert difference(torch.cat([piece[0][0] for piece in cache.pieces], dim=2), expected) <= 2e-5


@torch.no_grad()
def test_documents_do_not_touch_each_other():
    first, second = make_ids(30, seed=1), make_ids(27, seed=2)
    model = make_beacon()
    alone = model(second).logits
    one, two = BeaconCache(), BeaconCache()
    model(first, past_key_values=one)
    assert torch.equal(model(second).logits, alone)
    # Alternately, too.
    model(second[:, :13], past_key_values=two)
    model(first, past_key_values=one)
    assert difference(model(second[:, 13:], past_key_values=two).logits, alone[:, 13:]) <= 1e-4
    assert (one.tokens, two.tokens) == (60, 27)


@torch.no_grad()
def test_rows_of_a_batch_are_independent():
    ids = make_ids(21, rows=3)
    model = make_beacon()
    together = model(ids).logits
    for row in range(3):
        assert difference(model(ids[row : row + 1]).logits[0], together[row]) <= 5e-5


@torch.no_grad()
def test_embeddings_instead_of_ids():
    ids = make_ids(21, rows=2)
    for layout in ("v1", "v2"):
        model = make_beacon(layout=layout)
        embedded = model.get_base_model().get_input_embeddings()(ids)
        assert difference(model(inputs_embeds=embedded).logits, model(ids).logits) <= 1e-5


@torch.no_grad()
def test_ratios_for_each_interval():
    ids = make_ids(30)
    model = make_beacon()
    cache = BeaconCache()
    model(ids, ratios=[2, 8, 4], past_key_values=cache)
    assert (cache.ratios, cache.len_memory) == ([2, 8, 4], 4 + 1 + 2)
    assert difference(model(ids, ratio=2).logits[:, -1], model(ids, ratio=8).logits[:, -1]) > 1e-3
    with pytest.raises(PoSEError, match="ratios: 2 given, but 30 tokens after 0 uncondensed ones need 3"):
        model(ids, ratios=[2, 8])


@torch.no_grad()
def test_adapt_and_a_full_window():
    """Window 24, interval 8: ratio 4 holds 72 tokens; with ratio 2 the window is full after 40."""
    model = make_beacon(window=24, ratio="adapt")
    cache = BeaconCache()
    model(make_ids(72), past_key_values=cache)
    assert set(cache.ratios) == {4}
    with pytest.raises(PoSEError, match=r"window: 24 positions are full"):
        model(make_ids(48), ratio=2)
    with pytest.raises(PoSEError, match="adapt finds no ratio for 137 tokens"):
        model(make_ids(137))


@torch.no_grad()
def test_kept_logits_and_hidden_states():
    ids = make_ids(21, rows=2)
    model = make_beacon()
    whole = model(ids, output_hidden_states=True)
    assert difference(model(ids, logits_to_keep=1).logits, whole.logits[:, -1:]) <= 1e-5
    assert difference(model(ids, logits_to_keep=11).logits, whole.logits[:, -11:]) <= 1e-5
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([3, 20])).logits, whole.logits[:, [3, 20]])
    assert [layer.shape for layer in whole.hidden_states] == [(2, 21, 32)] * 3
    assert torch.equal(model.get_base_model().lm_head(whole.hidden_states[-1]), whole.logits)
    assert model(ids, return_dict=False)[0].shape == (2, 21, 64)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
WINDOWS = [
    # changes of the model, of the adapter; the window that results or the error
    ({}, {}, 128),
    ({}, {"window": 64}, 64),
    ({}, {"window": 129}, "window: 129 is more than max_position_embeddings, 128; give window: 128 or less"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, 128),
    ({"rope_parameters": LONGROPE}, {}, 32),
    (
        {"rope_parameters": LONGROPE},
        {"window": 64},
        "window: 64 is more than the length up to which rope 'longrope' keeps its frequencies, 32",
    ),
    ({"max_position_embeddings": 8}, {}, "interval: 8 leaves no room for memory in window 8"),
    ({"max_position_embeddings": 12}, {"overlap": 4}, "interval: 8 with overlap 4 leaves no room for memory"),
]


@pytest.mark.parametrize(("base", "adapter", "expected"), WINDOWS)
def test_window(base, adapter, expected):
    from peft import get_peft_model

    model = make_base("llama", **base)
    if isinstance(expected, str):
        with pytest.raises(PoSEError, match=expected):
            get_peft_model(model, make_config(**adapter))
    else:
        assert get_peft_model(model, make_config(**adapter)).base_model.window.size == expected


def test_sliding_window_bounds_the_window():
    from peft import get_peft_model

    assert get_peft_model(make_base("mistral", sliding_window=48), make_config()).base_model.window.size == 48
    with pytest.raises(PoSEError, match="window: 64 is more than sliding_window, 48"):
        get_peft_model(make_base("mistral", sliding_window=48), make_config(window=64))
    # Qwen's sliding_window has no effect unless layers use it.
    assert get_peft_model(make_base("qwen2", sliding_window=48), make_config()).base_model.window.size == 128


@torch.no_grad()
def test_longrope_stays_on_its_short_factors():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    from peft import get_peft_model

    ids = make_ids(60)
    model = get_peft_model(make_base("llama", rope_parameters=rope), make_config()).eval()
    before = model.base_model.rotary.inv_freq.clone()
    whole = model(ids).logits
    assert torch.equal(model.base_model.rotary.inv_freq, before)
    cache = BeaconCache()
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 33), (33, 60))]
    assert difference(torch.cat(parts, dim=1), whole) <= 1e-4


@torch.no_grad()
def test_memory_stays_in_the_window():
    """A text of 8 windows: what is cached never exceeds the window, in rows and in bytes."""
    model = make_beacon(window=32, interval=16, ratios=[2, 4, 8, 16], ratio=16)
    cache, rows = BeaconCache(), []
    ids = make_ids(16 * 16)
    for start in range(0, 256, 13):
        model(ids[:, start : start + 13], past_key_values=cache, logits_to_keep=1)
        rows.append(cache.len_memory + cache.len_tail)
        assert cache.nbytes() == rows[-1] * 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, fp32
    assert cache.tokens == 256
    assert max(rows) <= 32
    with pytest.raises(PoSEError, match="window: 32 positions are full"):
        model(make_ids(17), past_key_values=cache)


@pytest.mark.parametrize("layout", ["v1", "v2"])
def test_intervals_without_outputs_end_at_the_last_keys(layout):
    """Three intervals are read for their memory only; the last layer's MLP runs for the open one alone."""
    model, ids = make_beacon(layout=layout), make_ids(30)
    mlp, calls = model.base_model.model.model.layers[-1].mlp, []
    model.condense(ids)  # measures once how keys are rotated
    mlp.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        early = model.condense(ids)
        assert len(calls) == 1
        assert model(ids).logits.shape[1] == 30 and len(calls) == 1 + 4
        assert len(model(ids, logits_to_keep=1, output_hidden_states=True).hidden_states) == 3 and len(calls) == 1 + 8
        mlp._hf_hook = None  # accelerate's hooks around forwards must run to their ends
        complete = model.condense(ids)
    assert len(calls) == 1 + 12
    pairs = zip([*early.pieces, early.open], [*complete.pieces, complete.open], strict=True)
    assert all(
        torch.equal(a, b)
        for one, two in pairs
        for x, y in zip(one, two, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 1 + 16


@torch.no_grad()
def test_model_that_keeps_all_logits(monkeypatch):
    """If a model's forward has no logits_to_keep, the tuner cuts its logits."""
    ids = make_ids(21)
    for layout in ("v1", "v2"):
        model = make_beacon(layout=layout)
        expected = model(ids, logits_to_keep=9).logits
        monkeypatch.setattr(type(model.base_model), "accepts", frozenset({"past_key_values", "cache"}) & model.accepts)
        assert difference(model(ids, logits_to_keep=9).logits, expected) <= 1e-5
        monkeypatch.undo()
