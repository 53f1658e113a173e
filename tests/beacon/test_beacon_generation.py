"""generate(), chat turns, beams, condensed texts on disk."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from pose_plugin.beacon import BeaconCache, condensing, forward
from pose_plugin.utils.errors import PoSEError
from tests.models import ARCHITECTURES, make_base, make_beacon, make_config, make_ids, unlike_base

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@torch.no_grad()
def restream(model, ids: torch.Tensor, count: int, **how) -> torch.Tensor:
    """Greedy decoding that feeds every token by itself to a new cache."""
    cache = BeaconCache()
    for at in range(ids.shape[1]):
        logits = model(ids[:, at : at + 1], past_key_values=cache, **how).logits
    for _ in range(count):
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        logits = model(ids[:, -1:], past_key_values=cache, **how).logits
    return ids


@pytest.mark.parametrize("layout", ["v1", "v2"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generate_equals_restreaming(architecture, layout):
    """A prompt of 1.5 windows; the answer passes two interval borders."""
    model = make_beacon(architecture, layout=layout, window=32)
    ids = make_ids(50)
    expected = restream(model, ids, 18)
    assert torch.equal(model.generate(ids, max_new_tokens=18, **GREEDY), expected)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=18, use_cache=False, **GREEDY), expected)
    chunked = model.generate(ids, max_new_tokens=18, prefill_chunk_size=13, **GREEDY)
    assert torch.equal(chunked, expected)
    # The prompt matters beyond the last interval.
    other = torch.cat([make_ids(40, seed=3), ids[:, 40:]], dim=1)
    with torch.no_grad():
        assert (model(other).logits[:, -1] - model(ids).logits[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("layout", ["v1", "v2"])
def test_short_prompt_generates_like_the_base(layout):
    ids = make_ids(5)
    base = make_base().generate(ids, max_new_tokens=3, **GREEDY)
    model = make_beacon(layout=layout)
    if layout == "v1":
        assert torch.equal(model.generate(ids, max_new_tokens=3, **GREEDY), base)
    with model.disable_adapter():
        assert torch.equal(model.generate(ids, max_new_tokens=3, **GREEDY), base)
        with pytest.raises(PoSEError, match=r"context: .*disabled"):
            model.generate(ids, context=BeaconCache(), max_new_tokens=3)


def test_a_models_own_use_cache_false_is_ignored():
    """Training leaves use_cache: false in the config; only a call may ask to read the whole text for each token."""
    model = make_beacon()
    model.config.use_cache = model.generation_config.use_cache = False
    output = model.generate(make_ids(20), max_new_tokens=2, return_dict_in_generate=True, **GREEDY)
    stream = output.get("past_key_values", output.get("cache"))
    assert isinstance(stream, BeaconCache) and stream.tokens == 21


def test_model_is_left_as_it_was():
    model = make_beacon()
    inner = model.base_model.model
    model.generate(make_ids(20), max_new_tokens=2, **GREEDY)
    assert "forward" not in inner.__dict__
    with pytest.raises(PoSEError):
        model.generate(make_ids(20), max_new_tokens=2, ratio=3, **GREEDY)
    assert "forward" not in inner.__dict__
    assert model.base_model._base_forward is None


def test_chat_turns_continue_the_cache():
    """By Hugging Face's convention: the whole conversation and the cache of what was read of it."""
    model = make_beacon()
    cache = BeaconCache()
    first = model.generate(make_ids(30), past_key_values=cache, max_new_tokens=7, **GREEDY)
    assert cache.get_seq_length() == 36  # the last token was never read
    second = torch.cat([first, make_ids(12, seed=4)], dim=1)
    answer = model.generate(second, past_key_values=cache, max_new_tokens=9, **GREEDY)
    assert torch.equal(answer, model.generate(second, max_new_tokens=9, **GREEDY))
    assert cache.get_seq_length() == 30 + 7 + 12 + 8
    with pytest.raises(PoSEError, match="57 tokens are in the cache and inputs has 49"):
        model.generate(second, past_key_values=cache, max_new_tokens=2)


def test_condense_once_ask_often(tmp_path):
    """Questions do not change the context; saved and loaded it is the same."""
    model = make_beacon()
    document, questions = make_ids(45), [make_ids(6, seed=s) for s in (5, 6)]
    context = model.condense(document)
    assert (context.tokens, context.len_memory, context.pending) == (45, 10, 5)
    assert not any(t.requires_grad for layers in [*context.pieces, context.open] for pair in layers for t in pair)
    path = tmp_path / "document.safetensors"
    context.save(path)
    loaded = BeaconCache.load(path)
    assert repr(loaded) == repr(context)
    for question in questions:
        whole = torch.cat([document, question], dim=1)
        expected = model.generate(whole, max_new_tokens=10, **GREEDY)[:, 45:]
        for given in (context, loaded):
            assert torch.equal(model.generate(question, context=given, max_new_tokens=10, **GREEDY), expected)
            masked = {"attention_mask": torch.ones_like(question)}
            assert torch.equal(model.generate(question, context=given, max_new_tokens=10, **masked, **GREEDY), expected)
    assert (context.tokens, loaded.tokens) == (45, 45)
    longer = model.condense(questions[0][0], context=context)
    assert (longer.tokens, context.tokens) == (51, 45)


def test_saved_interleaved_context(tmp_path):
    model = make_beacon(layout="v2")
    context = model.condense(make_ids(45), ratio=2)
    context.save(tmp_path / "c.safetensors")
    loaded = BeaconCache.load(tmp_path / "c.safetensors")
    question = make_ids(9, seed=5)
    answers = [model.generate(question, context=c, max_new_tokens=8, **GREEDY) for c in (context, loaded)]
    assert torch.equal(*answers)
    assert loaded.open_ratio == 2


def test_files_that_are_no_context(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, str(tmp_path / "other"))
    with pytest.raises(PoSEError, match="has format None"):
        BeaconCache.load(tmp_path / "other")


def test_context_of_another_model():
    context = make_beacon(interval=4).condense(make_ids(20))
    with pytest.raises(PoSEError, match="cache: made with interval=4, but this model reads with interval=8"):
        make_beacon().generate(make_ids(3), context=context, max_new_tokens=2)


@torch.no_grad()
def test_context_of_another_adapter(tmp_path):
    """Its memory means nothing to this adapter, and would be read silently."""
    model = make_beacon()
    model.add_adapter("other", make_config())
    model.condense(make_ids(20)).save(tmp_path / "c.safetensors")
    model.set_adapter("other")
    unlike_base(model, seed=7)
    loaded = BeaconCache.load(tmp_path / "c.safetensors")
    with pytest.raises(PoSEError, match=r"another adapter condensed it .*'other'"):
        model(make_ids(3), past_key_values=loaded)
    model.set_adapter("default")
    model(make_ids(3), past_key_values=loaded)


@torch.no_grad()
def test_context_of_a_model_that_is_gone(monkeypatch):
    """Python gives its number to a later model: of 30 models that were made in turn, three had that of another."""
    monkeypatch.setattr(forward, "id", lambda value: 1, raising=False)
    context = make_beacon().condense(make_ids(20))
    other = make_beacon()
    unlike_base(other, seed=7)
    with pytest.raises(PoSEError, match="another adapter condensed it"):
        other(make_ids(3), past_key_values=context)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_context_in_another_dtype(attention):
    """An adapter in another dtype is the same adapter; reading continues in the model's dtype."""
    fp32, bf16 = make_beacon(attention=attention), make_beacon(attention=attention).to(torch.bfloat16)
    expected = bf16(make_ids(12, seed=4), past_key_values=bf16.condense(make_ids(20))).logits
    cache = fp32.condense(make_ids(20))
    read = bf16(make_ids(12, seed=4), past_key_values=cache).logits
    assert read.dtype == torch.bfloat16
    assert (read - expected).abs().max() < 0.05 * expected.abs().max()
    assert {t.dtype for layers in [*cache.pieces, cache.open] for pair in layers for t in pair} == {torch.bfloat16}
    back = fp32(make_ids(12, seed=4), past_key_values=bf16.condense(make_ids(20))).logits
    assert back.dtype == torch.float32


def test_beam_search():
    """Beams reorder memory and open interval alike: the same as beams without any cache."""
    model = make_beacon()
    ids = make_ids(38)
    how = {"num_beams": 3, "max_new_tokens": 12, "early_stopping": False, **GREEDY}
    expected = model.generate(ids, use_cache=False, **how)
    assert torch.equal(model.generate(ids, **how), expected)
    context = model.condense(ids[:, :30])
    assert torch.equal(model.generate(ids[:, 30:], context=context, **how), expected[:, 30:])
    assert context.batch_size == 1
    greedy = model.generate(ids, max_new_tokens=12, **GREEDY)
    assert not torch.equal(greedy, expected)  # the beams differ, so reordering was used


def test_reorder_and_select():
    model = make_beacon()
    ids = make_ids(20, rows=3)
    cache = model.condense(ids)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    with torch.no_grad():
        found = model(make_ids(5, rows=1, seed=9).expand(3, -1), past_key_values=cache).logits
        alone = model(make_ids(5, seed=9), past_key_values=model.condense(ids[2:])).logits
    assert (found[0] - alone[0]).abs().max() <= 5e-5
    assert (found[1] - found[2]).abs().max() <= 5e-5
    assert (found[0] - found[1]).abs().max() > 1e-3
    # More rows than texts are beams, or questions: those of one text are adjacent.
    with torch.no_grad():
        asked = make_ids(5, rows=6, seed=9)
        found = model(asked, past_key_values=model.condense(ids)).logits
        for row in range(6):
            alone = model(asked[row : row + 1], past_key_values=model.condense(ids[row // 2 : row // 2 + 1])).logits
            assert (found[row] - alone[0]).abs().max() <= 5e-5


def test_batch_of_equal_layout():
    model = make_beacon()
    ids = make_ids(30, rows=3)
    together = model.generate(ids, max_new_tokens=12, **GREEDY)
    for row in range(3):
        assert torch.equal(model.generate(ids[row : row + 1], max_new_tokens=12, **GREEDY)[0], together[row])
    context = model.condense(ids[:1])
    several = model.generate(make_ids(4, rows=2, seed=2), context=context, max_new_tokens=5, **GREEDY)
    assert torch.equal(
        several[1:], model.generate(make_ids(4, rows=2, seed=2)[1:], context=context, max_new_tokens=5, **GREEDY)
    )
    with pytest.raises(PoSEError, match="it holds 3 rows, the input 2"):
        model.generate(make_ids(4, rows=2), context=model.condense(ids), max_new_tokens=2, **GREEDY)


def test_padded_prompts_are_refused():
    model = make_beacon()
    ids = make_ids(20, rows=2)
    for mask in ([[0] * 5 + [1] * 15], [[1] * 15 + [0] * 5]):
        attention = torch.tensor([[1] * 20, *mask])
        with pytest.raises(PoSEError, match="attention_mask: padding"):
            model.generate(ids, attention_mask=attention, max_new_tokens=2, **GREEDY)


@torch.no_grad()
def test_a_fresh_dynamic_cache_is_empty():
    """An empty DynamicCache may be true; taken for a cache with a prompt, the prompt would be dropped."""
    model = make_beacon()
    ids = make_ids(30)
    fresh = DynamicCache()
    assert bool(fresh) or len(fresh) == 0
    output = model(ids, past_key_values=fresh, use_cache=True)
    assert torch.equal(output.logits, model(ids).logits)
    stream = next(value for value in output.values() if isinstance(value, BeaconCache))
    assert stream.tokens == 30
    with pytest.raises(PoSEError, match="an earlier call got this DynamicCache too"):  # it is still empty
        model(ids[:, :1], past_key_values=fresh)
    used = DynamicCache()
    make_base()(ids[:, :4], past_key_values=used, use_cache=True)
    with pytest.raises(PoSEError, match="a DynamicCache with 4 tokens cannot be continued"):
        model(ids[:, 4:], past_key_values=used)
    for other in ("document.safetensors", ((1, 2),)):
        with pytest.raises(PoSEError, match=f"a {type(other).__name__} is no cache; give a BeaconCache"):
            model.generate(ids, context=other, max_new_tokens=2)
    assert bool(BeaconCache())  # so that `cache or new` keeps it
    assert model(ids, past_key_values=(own := BeaconCache())) is not None
    assert own.tokens == 30


def test_condensing():
    model = make_beacon(ratio=2)
    ids = make_ids(30)
    eighth = model.condense(ids, ratio=8)
    with condensing(model, ratio=8):
        assert model.condense(ids).ratios == eighth.ratios == [8, 8, 8]
        assert torch.equal(model.generate(ids, max_new_tokens=12, **GREEDY), restream(model, ids, 12))
        with condensing(model, compression_ratio=0.75):
            assert model.condense(ids).ratios == [4, 4, 4]
        assert model.condense(ids).ratios == [8, 8, 8]
    assert model.condense(ids).ratios == [2, 2, 2]
    with pytest.raises(RuntimeError), condensing(model, ratio="adapt"):
        raise RuntimeError
    assert model.base_model._ratio_override is None
    for wrong, message in (
        ({}, "give either ratio"),
        ({"ratio": 8, "compression_ratio": 0.5}, "give either ratio"),
        ({"ratio": 3}, "must be a whole number"),
    ):
        with pytest.raises(PoSEError, match=message), condensing(model, **wrong):
            pass
    with pytest.raises(PoSEError, match="LlamaForCausalLM has no Beacon adapter"), condensing(make_base(), ratio=8):
        pass


def test_ratios_by_interval_in_generate():
    model = make_beacon()
    cache = BeaconCache()
    model.generate(make_ids(30), ratios=[2, 4, 8], past_key_values=cache, max_new_tokens=12, **GREEDY)
    assert cache.ratios == [2, 4, 8, 8, 8]
    with pytest.raises(PoSEError, match="ratios: use_cache=False"):
        model.generate(make_ids(30), ratios=[2, 8, 4], use_cache=False, max_new_tokens=2)


def test_adapt_leaves_room_for_the_answer():
    """72 tokens fit at ratio 4; with 60 more to come the prompt is condensed by 8 from its start."""
    model = make_beacon(window=24, ratio="adapt")
    for new, ratio in ((4, 4), (60, 8)):
        for given in ({"max_new_tokens": new}, {"max_length": 60 + new}):
            cache = BeaconCache()
            model.generate(make_ids(60), past_key_values=cache, **given, **GREEDY)
            assert set(cache.ratios) == {ratio}


@torch.no_grad()
def test_guidance_reads_the_prompt_twice():
    """transformers then calls the model with ids that have no name."""
    model, ids = make_beacon(ratio="adapt"), make_ids(40)
    how = {"guidance_scale": 1.5, "max_new_tokens": 6, **GREEDY}
    assert torch.equal(model.generate(ids, **how), make_base().generate(ids, **how))
    assert model.generate(ids, ratio=4, negative_prompt_ids=make_ids(30, seed=1), **how).shape == (1, 46)


def test_how_much_is_generated_is_what_transformers_generates(monkeypatch):
    """The room that is checked is that of the answer, however its length is given."""
    model, ids = make_beacon(window=24), make_ids(40)
    rooms: list[int] = []
    check = type(model.base_model).check_room
    monkeypatch.setattr(type(model.base_model), "check_room", lambda *args: (rooms.append(args[-1]), check(*args)))
    embedded = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    for given, prompt in (({"input_ids": ids}, 40), (embedded, 0)):
        assert model.generate(**given, max_length=45, **GREEDY).shape == (1, prompt + 5)
        config = GenerationConfig(max_length=45)
        assert model.generate(**given, generation_config=config, **GREEDY).shape == (1, prompt + 5)
    assert rooms == [5] * 4
    # By default 20 tokens, also behind a text that is longer than the base's window.
    assert make_beacon().generate(make_ids(200), **GREEDY).shape == (1, 220)
    with pytest.raises(PoSEError, match="max_new_tokens: 20 tokens do not fit window 24"):
        model.generate(make_ids(70), **GREEDY)
    model.generation_config.max_new_tokens = 3
    assert model.generate(ids, generation_config=GenerationConfig(top_k=1), **GREEDY).shape == (1, 43)
    assert rooms[-1] == 3


def test_removing_tokens():
    """crop can remove the open interval's tokens, as assisted decoding needs, and no others."""
    for layout in ("v1", "v2"):
        model = make_beacon(layout=layout)
        ids = make_ids(30)
        cache = model.condense(ids)
        cache.crop(-4)
        assert (cache.tokens, cache.pending) == (26, 2)
        again = model(ids[:, 26:], past_key_values=cache).logits
        assert (again - model(ids).logits[:, 26:]).abs().max() <= 1e-4
        with pytest.raises(PoSEError, match="7 tokens cannot be removed, only the last 6"):
            cache.crop(-7)
        # In older transformers, a positive number was the length to keep.
        with pytest.raises(PoSEError, match="crop: 3 is not negative"):
            cache.crop(3)


@pytest.mark.parametrize("layout", ["v1", "v2"])
@torch.no_grad()
def test_a_context_is_saved_after_removing_tokens(layout, tmp_path):
    """Down to an interval's border no open row is left; after 18 tokens, the last row of v2 would be a beacon."""
    model, ids, path = make_beacon(layout=layout, ratio=2, overlap=3), make_ids(30), tmp_path / "c.safetensors"
    expected = model(ids).logits
    for read, kept in ((20, 16), (19, 18)):
        context = model.condense(ids[:, :read])
        context.crop(kept - read)
        context.save(path)
        for given in (context, BeaconCache.load(path)):
            assert (given.tokens, given.pending) == (kept, kept - 16)
            assert (model(ids[:, kept:], context=given).logits - expected[:, kept:]).abs().max() <= 1e-4
    raw = model.condense(ids[:, :4], ratio="adapt")
    raw.crop(-4)  # nothing is left, so another number of rows may follow
    assert model(make_ids(20, rows=2), past_key_values=raw).logits.shape[0] == 2


@pytest.mark.parametrize("layout", ["v1", "v2"])
@torch.no_grad()
def test_removing_tokens_past_an_interval_border(layout):
    """With `undoes`, the interval condensed last is kept, so that crop can reach past its end."""
    model, ids = make_beacon(layout=layout), make_ids(40)
    expected = model(ids).logits
    for kept in (15, 16, 17, 20):
        cache = model.condense(ids[:, :13])
        cache.undoes = True
        model(ids[:, 13:20], past_key_values=cache)  # condenses the second interval
        cache.crop(kept - 20)
        assert (cache.tokens, cache.ratios) == (kept, [4] * (kept // 8))
        again = model(ids[:, kept:], past_key_values=cache).logits
        assert (again - expected[:, kept:]).abs().max() <= 1e-4
    with pytest.raises(PoSEError, match="17 tokens cannot be removed, only the last 16"):
        cache.crop(-17)  # before token 24, so two borders
    assert (cache.tokens, cache.ratios) == (40, [4] * 4)
    cache.crop(-16)
    assert (cache.tokens, cache.pending, cache.ratios) == (24, 0, [4] * 3)
    assert model.condense(ids).before is None  # without `undoes` nothing more is kept


@pytest.mark.parametrize("layout", ["v1", "v2"])
def test_assisted_decoding(layout):
    """Rejected guesses are on both sides of interval borders."""
    model = make_beacon(layout=layout)
    ids = make_ids(30)
    expected = model.generate(ids, max_new_tokens=30, **GREEDY)
    looked_up = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
    in_config = {"generation_config": GenerationConfig(**looked_up)}
    for how in ({"assistant_model": make_base()}, looked_up, in_config, {"assistant_early_exit": 1}):
        assert torch.equal(model.generate(ids, max_new_tokens=30, **how, **GREEDY), expected)
        cache = BeaconCache()
        assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=30, **how, **GREEDY), expected)
        assert (cache.tokens >= 59, cache.undoes, cache.before) == (True, False, None)
        for given in ({"context": model.condense(ids[:, :25])}, {"past_key_values": model.condense(ids[:, :25])}):
            with pytest.raises(PoSEError, match="cache: with assistant_model or prompt_lookup_num_tokens"):
                model.generate(ids, max_new_tokens=2, **given, **how, **GREEDY)


def test_reset_and_size():
    model = make_beacon()
    cache = model.condense(make_ids(45))
    # two layers, keys and values, two heads of 8 in fp32
    assert cache.nbytes() == (10 + 5) * 2 * 2 * 2 * 8 * 4
    cache.reset()
    assert (cache.tokens, cache.len_memory, len(cache), cache.batch_size) == (0, 0, 0, -1)
    assert cache.nbytes() == 0
