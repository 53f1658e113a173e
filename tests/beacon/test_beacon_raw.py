"""With `adapt`, texts that fit the window are read raw, bit for bit as by the base; longer ones are condensed."""

from __future__ import annotations

import pytest
import torch

from pose_plugin.beacon import BeaconCache
from pose_plugin.utils.errors import PoSEError
from tests.models import make_base, make_beacon, make_ids

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
WINDOW = {"window": 32, "ratio": "adapt"}
LAYOUTS = ["v1", "v2"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_a_text_that_fits_the_window_gets_the_bases_logits(layout, attention):
    """Up to L = 32 tokens, which are four intervals, with headroom for a default reading only if a cache goes on."""
    base, model = make_base(attention=attention), make_beacon(attention=attention, layout=layout, headroom=4, **WINDOW)
    ids = make_ids(33, rows=2)
    for count in (1, 9, 32):
        for how in ({}, {"attention_mask": torch.ones(2, count, dtype=torch.long)}):
            assert torch.equal(
                model(ids[:, :count], **how).logits, make_base(attention=attention)(ids[:, :count]).logits
            )
    assert (model(ids).logits[:, -1] - base(ids).logits[:, -1]).abs().max() > 1e-3
    for count, ratios in ((28, []), (29, [2] * 3)):
        assert model.condense(ids[:, :count]).ratios == ratios
    assert model.condense(ids[:, :20], headroom=12).ratios == []
    assert model.condense(ids[:, :20], headroom=13).ratios == [2] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_reading_on_past_the_window_condenses_then(layout):
    """The text is read again, so the logits equal those of one long reading, however it was cut."""
    model = make_beacon(layout=layout, headroom=0, **WINDOW)
    ids = make_ids(60)
    whole = model(ids).logits
    raw = make_base()(ids[:, :32]).logits
    for cuts in ([10], [10, 32], [5, 6, 20]):
        cache, parts = BeaconCache(), []
        for start, end in zip([0, *cuts], [*cuts, 60], strict=True):
            parts.append(model(ids[:, start:end], past_key_values=cache, output_hidden_states=True))
        assert cache.ratios == model.condense(ids).ratios and cache.text is None
        assert (parts[-1].logits - whole[:, cuts[-1] :]).abs().max() <= 1e-4
        assert parts[-1].hidden_states[0].shape[1] == 60 - cuts[-1]
        first = torch.cat([part.logits for part in parts[:-1]], dim=1)
        assert (first - raw[:, : cuts[-1]]).abs().max() <= 1e-4
    short = model.condense(ids[:, :20])
    assert (model(ids[:, 20:], context=short, logits_to_keep=2).logits - whole[:, -2:]).abs().max() <= 1e-4
    assert (short.tokens, short.ratios) == (20, [])
    fixed = model(ids[:, 20:], context=short, ratio=8).logits
    assert (fixed - model(ids, ratio=8).logits[:, 20:]).abs().max() <= 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generating(layout, tmp_path):
    """Raw while prompt and answer fit the window; otherwise condensed from the start, with or without a cache."""
    model, ids = make_beacon(layout=layout, headroom=0, **WINDOW), make_ids(20)
    base = make_base().generate(ids, max_new_tokens=12, **GREEDY)
    assert torch.equal(model.generate(ids, max_new_tokens=12, **GREEDY), base)
    context = model.condense(ids)
    context.save(tmp_path / "raw.safetensors")
    for given in (context, BeaconCache.load(tmp_path / "raw.safetensors")):
        asked = torch.cat([ids, make_ids(4, seed=3)], dim=1)
        for new in (8, 30):
            expected = model.generate(asked, max_new_tokens=new, **GREEDY)
            answer = model.generate(make_ids(4, seed=3), context=given, max_new_tokens=new, **GREEDY)
            assert torch.equal(answer, expected[:, 20:])
            assert torch.equal(model.generate(asked, max_new_tokens=new, use_cache=False, **GREEDY), expected)
    stream = BeaconCache()
    model.generate(ids, past_key_values=stream, max_new_tokens=40, **GREEDY)
    assert len(stream.ratios) == 7


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generating_from_embeddings(layout):
    model = make_beacon(layout=layout, headroom=0, overlap=3, **WINDOW)
    for tokens in (6, 20, 45):
        ids = make_ids(tokens, rows=2)
        embedded = model.get_base_model().get_input_embeddings()(ids)
        answer = model.generate(inputs_embeds=embedded, max_new_tokens=14, **GREEDY)
        assert torch.equal(answer, model.generate(ids, max_new_tokens=14, **GREEDY)[:, tokens:])


@torch.no_grad()
def test_embeddings_batches_and_cropping():
    model, ids = make_beacon(headroom=0, **WINDOW), make_ids(50)
    embedded = model.get_base_model().get_input_embeddings()(ids)
    expected = model(ids).logits[:, 20:]
    for first, second in ((ids, embedded), (embedded, ids), (embedded, embedded)):
        key = {2: "input_ids", 3: "inputs_embeds"}
        cache = BeaconCache()
        model(**{key[first.dim()]: first[:, :20]}, past_key_values=cache)
        found = model(**{key[second.dim()]: second[:, 20:]}, past_key_values=cache).logits
        assert (found - expected).abs().max() <= 1e-4
    cache = model.condense(ids[:, :25])
    cache.crop(-5)
    assert (cache.tokens, cache.text.shape[1]) == (20, 20)
    cache.batch_repeat_interleave(2)
    found = model(ids[:, 20:].expand(2, -1), past_key_values=cache).logits
    assert (found - expected).abs().max() <= 1e-4


@torch.no_grad()
def test_ids_of_a_file_are_checked_before_they_are_read_again(tmp_path):
    model = make_beacon(headroom=0, **WINDOW)
    context = model.condense(make_ids(20))
    context.text[0, 3] = 64  # a beacon inside the model
    context.save(tmp_path / "c")
    with pytest.raises(PoSEError, match="64 is not in the model's vocabulary"):
        model(make_ids(20), context=BeaconCache.load(tmp_path / "c"))


def test_training_always_condenses():
    model = make_beacon(train_ratio="adapt", **WINDOW).train()
    model(make_ids(20), labels=make_ids(20)).loss.backward()
    assert model.base_model.condensed_since_step == 2


@torch.no_grad()
def test_a_fixed_ratio_condenses_and_v2_then_differs_from_the_base():
    ids = make_ids(6)
    expected = make_base()(ids).logits
    assert torch.equal(make_beacon(ratio=4)(ids).logits, expected)
    assert not torch.equal(make_beacon(ratio=4, layout="v2")(ids).logits, expected)
    assert make_beacon(ratio=4).condense(make_ids(20)).ratios == [4, 4]


def test_what_may_be_generated_must_fit_before_anything_is_generated():
    """A ratio that cannot last would be refused after hundreds of tokens, and these would be lost."""
    model = make_beacon(window=32)
    calls = []
    hook = model.base_model.model.register_forward_hook(lambda *_: calls.append(1))
    context = model.condense(make_ids(16))
    calls.clear()
    for how in ({"ratio": 2}, {"ratios": [2, 2]}, {"ratio": 2, "use_cache": False}):
        with pytest.raises(PoSEError, match="max_new_tokens: 60 tokens do not fit window 32 after 20 tokens"):
            model.generate(make_ids(20), max_new_tokens=60, **how, **GREEDY)
    with pytest.raises(PoSEError, match="max_new_tokens: 200"):
        model.generate(make_ids(4), context=context, max_new_tokens=200, **GREEDY)
    with pytest.raises(PoSEError, match="headroom of 300"):
        model.generate(make_ids(20), max_new_tokens=300, ratio="adapt", **GREEDY)
    assert not calls
    hook.remove()
    # To the token: at ratio 2 the window holds 56, and the last one generated is not read.
    assert model.generate(make_ids(20), max_new_tokens=37, ratio=2, **GREEDY).shape[1] == 57
    with pytest.raises(PoSEError, match="max_new_tokens: 38"):
        model.generate(make_ids(20), max_new_tokens=38, ratio=2, **GREEDY)


@pytest.mark.parametrize(
    ("changes", "prompt", "new"),
    [
        ({"window": 18, "overlap": 3, "headroom": 60}, 2, 14),  # more headroom than the window can keep free
        ({"window": 25, "interval": 12, "ratios": [4], "layout": "v2", "headroom": 60}, 6, 36),
        ({"window": 30, "ratios": [2, 4], "layout": "v2"}, 2, 81),  # an open interval keeps the ratio it has begun with
    ],
)
def test_what_adapt_has_accepted_is_generated_to_its_end(changes, prompt, new):
    model = make_beacon(**{"ratio": "adapt", "ratios": [2, 4, 8], **changes})
    cache = BeaconCache()
    answer = model.generate(make_ids(prompt), past_key_values=cache, max_new_tokens=new, **GREEDY)
    assert answer.shape[1] == prompt + new
    assert cache.ratios == sorted(cache.ratios)  # it never returns to a smaller one


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generating_without_a_cache_keeps_the_ratio(layout):
    """Each token is read with the whole text; what was kept free for it must not be kept free again behind it."""
    model, ids = make_beacon(layout=layout, headroom=40, **WINDOW), make_ids(14)
    cached = model.generate(ids, max_new_tokens=11, **GREEDY)
    assert torch.equal(model.generate(ids, max_new_tokens=11, use_cache=False, **GREEDY), cached)


@torch.no_grad()
def test_a_context_is_not_changed_and_the_old_word_is_refused():
    model, ids = make_beacon(), make_ids(6, seed=2)
    context = model.condense(make_ids(20))
    expected = model(ids, past_key_values=context.copy()).logits
    assert torch.equal(model(ids, context=context).logits, expected) and context.tokens == 20
    with pytest.raises(PoSEError, match="cache: give a condensed text as context"):
        model.generate(ids, cache=context)
    for read in (model, model.generate):
        with pytest.raises(PoSEError, match="context: give either context"):
            read(ids, context=context, past_key_values=context)
    if model.base_model.cache_key == "cache":
        return  # transformers' own word for a cache that is continued in place
    with pytest.raises(PoSEError, match="cache: give a condensed text as context"):
        model(ids, cache=context)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_of_another_text_is_refused(rows):
    """E.g. a chat template that drops earlier thoughts: the cache would be read as if it held the new text."""
    model, cache = make_beacon(headroom=0, **WINDOW), BeaconCache()
    first = model.generate(make_ids(10), past_key_values=cache, max_new_tokens=4, **GREEDY)
    asked = torch.cat([first, make_ids(3, seed=3)], dim=1).repeat(rows, 1)
    other = asked.clone()
    other[-1, 9] = 2 + (int(other[-1, 9]) - 1) % 60
    with pytest.raises(PoSEError, match=r"token 9 of inputs is not .*crop\(-4\)"):
        model.generate(other, past_key_values=cache, max_new_tokens=5, **GREEDY)
    again = cache.copy()
    again.crop(-4)
    for text, stream in ((asked, cache), (other, again)):
        answer = model.generate(text, past_key_values=stream, max_new_tokens=5, **GREEDY)
        assert torch.equal(answer, model.generate(text, max_new_tokens=5, **GREEDY))


def test_a_condensed_cache_of_another_text_is_refused(tmp_path):
    """Its text is gone, but not the digest of it: through a file, and for each row."""
    model, cache = make_beacon(headroom=0, **WINDOW), BeaconCache()
    first = model.generate(make_ids(60, rows=2), past_key_values=cache, max_new_tokens=4, **GREEDY)
    assert cache.ratios and cache.text is None
    cache.save(tmp_path / "c.safetensors")
    cache = BeaconCache.load(tmp_path / "c.safetensors")
    asked = torch.cat([first, make_ids(3, rows=2, seed=3)], dim=1)
    for change in ((1, [0, 1], [1, 0]), (1, [20], [21])):
        row, to, of = change
        other = asked.clone()
        other[row, to] = asked[row, of]
        with pytest.raises(PoSEError, match=r"one of the first 63 tokens of inputs is not the one in the cache"):
            model.generate(other, past_key_values=cache, max_new_tokens=2, **GREEDY)
    assert model.generate(asked, past_key_values=cache, max_new_tokens=2, **GREEDY).shape == (2, 69)


def test_condense_takes_what_a_tokenizer_returns():
    model, ids = make_beacon(), make_ids(20)
    encoded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert repr(model.condense(**encoded)) == repr(model.condense(ids))
    encoded["attention_mask"][:, :3] = 0
    with pytest.raises(PoSEError, match="attention_mask: padding"):
        model.condense(**encoded)
