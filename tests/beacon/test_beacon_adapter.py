"""The adapter as PEFT sees it: registering, saving, loading, several adapters, unloading, and bad settings."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from peft.utils import PeftType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pose_plugin.beacon import BeaconCache, BeaconConfig, BeaconEmbedding, BeaconModel, beacon_gradient_norm, find_tuner
from pose_plugin.beacon.register import NAME, peft_type, register
from pose_plugin.utils.errors import PoSEError
from tests.models import CONFIGS, make_base, make_beacon, make_config, make_ids, small_config, unlike_base


def test_peft_knows_the_method():
    """Fails loudly when a new PEFT changes its enum or its tables."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

    member = peft_type()
    assert member is PeftType(NAME) is PeftType[NAME] is getattr(PeftType, NAME)
    assert isinstance(member, PeftType)
    assert member in list(PeftType)
    assert len(PeftType.__members__) == len(list(PeftType))
    assert PEFT_TYPE_TO_CONFIG_MAPPING[member] is PEFT_TYPE_TO_CONFIG_MAPPING[NAME] is BeaconConfig
    assert PEFT_TYPE_TO_TUNER_MAPPING[member] is BeaconModel
    assert PEFT_TYPE_TO_PREFIX_MAPPING[member] == "beacon_"
    register(BeaconConfig, BeaconModel)  # a second time is harmless
    assert copy.deepcopy(member) is member
    # Every other method is still there.
    assert PeftType("LORA") is PeftType.LORA


def test_only_beacons_are_trained():
    """Full copies of q, k, v, o in each layer and one embedding row; biases as the base has them."""
    model = get_peft_model(make_base("qwen2"), make_config())
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    expected = {"base_model.model.model.embed_tokens.beacon_embedding.default.weight": (1, 32)}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.self_attn."
        for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", 32)):
            expected[f"{prefix}{name}.beacon_proj.default.weight"] = (rows, 32)
            if name != "o_proj":  # Qwen2 has biases on q, k, v
                expected[f"{prefix}{name}.beacon_proj.default.bias"] = (rows,)
    assert trained == expected


def test_beacons_begin_as_copies():
    base = make_base("qwen2")
    model = get_peft_model(base, make_config())
    for layer in base.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            own = projection.beacon_proj["default"]
            assert torch.equal(own.weight, projection.base_layer.weight)
            assert torch.equal(own.bias, projection.base_layer.bias)
            assert own.weight.data_ptr() != projection.base_layer.weight.data_ptr()
    tuner = find_tuner(model)
    assert torch.equal(tuner.embedding.row()[0], tuner.embedding.base_layer.weight[1])  # EOS
    assert tuner.embedding.sentinel == 64


def test_low_rank_begins_as_the_base():
    """Its delta is zero, so before training it reads like a full copy."""
    ids = make_ids(20)
    full = get_peft_model(make_base(), make_config()).eval()
    low = get_peft_model(make_base(), make_config(rank=3)).eval()
    with torch.no_grad():
        assert (full(ids).logits - low(ids).logits).abs().max() <= 1e-5
    shapes = {name.rpartition("self_attn.")[2]: tuple(p.shape) for name, p in low.named_parameters() if p.requires_grad}
    assert shapes["q_proj.beacon_A.default.weight"] == (3, 32)
    assert shapes["k_proj.beacon_B.default.weight"] == (16, 3)


def test_adding_an_adapter_leaves_the_generator_alone():
    for changes in ({}, {"rank": 3}):
        before = torch.random.get_rng_state()
        get_peft_model(make_base(), make_config(**changes))
        assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("changes", [{}, {"rank": 2}, {"layout": "v2"}])
@torch.no_grad()
def test_save_and_load(tmp_path, changes):
    """The file holds beacon tensors only; a reloaded adapter gives the same logits."""
    ids = make_ids(30)
    base_dir, adapter_dir = tmp_path / "base", tmp_path / "adapter"
    make_base().save_pretrained(base_dir)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model = get_peft_model(base, make_config(**changes)).eval()
    unlike_base(model)
    expected = model(ids).logits
    model.save_pretrained(adapter_dir)
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    assert tensors
    assert all(".beacon_" in key for key in tensors)
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    saved = json.loads((adapter_dir / "adapter_config.json").read_text())
    assert saved["peft_type"] == "POSE_PLUGIN_BEACON"
    assert saved["task_type"] == "CAUSAL_LM"
    assert saved["interval"] == 8

    def same(logits):
        # Two-row matrices of a file that is mapped into memory are multiplied by another kernel than fresh ones.
        return torch.equal(logits, expected) or ("rank" in changes and torch.allclose(logits, expected, atol=1e-5))

    loaded = PeftModel.from_pretrained(make_base(), adapter_dir).eval()
    assert same(loaded(ids).logits)
    assert not any(p.requires_grad for p in loaded.parameters())
    auto = AutoPeftModelForCausalLM.from_pretrained(adapter_dir, dtype=torch.float32).eval()
    assert same(auto(ids).logits)
    lean = PeftModel.from_pretrained(make_base(), adapter_dir, low_cpu_mem_usage=True).eval()
    assert same(lean(ids).logits)
    trainable = PeftModel.from_pretrained(make_base(), adapter_dir, is_trainable=True)
    assert sum(p.requires_grad for p in trainable.parameters()) == len(tensors)


@torch.no_grad()
def test_several_adapters(tmp_path):
    ids = make_ids(30)
    first, second = make_beacon(), make_beacon(mask="full", interval=4)
    unlike_base(second, seed=5)
    one, two = first(ids).logits, second(ids).logits
    assert not torch.equal(one, two)
    second.save_pretrained(tmp_path)

    first.load_adapter(tmp_path, adapter_name="other")
    assert torch.equal(first(ids).logits, one)
    first.set_adapter("other")
    assert torch.equal(first(ids).logits, two)
    assert first.base_model.active_config.mask == "full"
    first.set_adapter("default")
    assert torch.equal(first(ids).logits, one)
    trained = [name for name, p in first.named_parameters() if p.requires_grad]
    assert trained
    assert all(".default." in name for name in trained)

    first.add_adapter("third", make_config(rank=2))
    assert [n for n, p in first.named_parameters() if p.requires_grad] == trained
    first.set_adapter("third")
    assert all(".third." in n for n, p in first.named_parameters() if p.requires_grad)
    first.delete_adapter("third")
    first.set_adapter("default")
    assert torch.equal(first(ids).logits, one)
    with pytest.raises(PoSEError, match="one adapter at a time"):
        first.base_model.set_adapter(["default", "other"])
        first(ids)


@torch.no_grad()
def test_unload_gives_the_base_back():
    ids = make_ids(30)
    expected = make_base()(ids).logits
    model = make_beacon()
    base = model.unload()
    assert torch.equal(base(ids).logits, expected)
    assert not isinstance(base.get_input_embeddings(), BeaconEmbedding)
    assert not any(module._forward_pre_hooks for module in base.modules())
    assert all("_can_checkpoint_with_cache" not in module.__dict__ for module in base.modules())


def test_merging_is_refused():
    model = make_beacon()
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(PoSEError, match="cannot be merged"):
            merge()
    with pytest.raises(PoSEError, match="cannot be merged"):
        model.base_model.model.model.layers[0].self_attn.q_proj.merge()


def test_copies_are_not_doubled_to_fp32():
    """PEFT casts bf16 adapters to fp32 by default, which would double a copy of billions of weights."""
    base = make_base().to(torch.bfloat16)
    model = get_peft_model(base, make_config())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    asked = get_peft_model(make_base().to(torch.bfloat16), make_config(dtype="float32"))
    assert {p.dtype for p in asked.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bf16(dtype, attention):
    """Reading and training work, and agree with fp32 within bf16's precision."""
    ids = make_ids(26)
    model = get_peft_model(make_base("llama", attention).to(torch.bfloat16), make_config(dtype=dtype))
    short = make_base("llama", attention).to(torch.bfloat16)(ids[:, :8]).logits
    assert torch.equal(model.eval()(ids[:, :8]).logits, short)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    fp32 = get_peft_model(make_base("llama", attention), make_config(dtype=dtype)).train()(ids, labels=ids).loss
    assert abs(loss.item() - fp32.item()) < 0.05 * fp32.item()


def test_autocast():
    ids = make_ids(26)
    model = make_beacon(attention="eager").train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("rank", [0, 2])
def test_four_bit_base(tmp_path, rank):
    """The base stays quantised; copies are its dequantised weights in the compute dtype."""
    bnb = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    unquantised = make_base("llama", hidden_size=64, intermediate_size=64)
    unquantised.save_pretrained(tmp_path)
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )

    def load():
        return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantisation, dtype=torch.bfloat16)

    ids = make_ids(26)
    model = get_peft_model(load(), make_config(rank=rank))
    projection = model.base_model.model.model.layers[0].self_attn.k_proj
    assert isinstance(projection.base_layer, bnb.nn.Linear4bit)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}
    if not rank:
        own = projection.beacon_proj["default"].weight
        dequantised = bnb.functional.dequantize_4bit(
            projection.base_layer.weight.data, projection.base_layer.weight.quant_state
        )
        assert torch.equal(own, dequantised.to(torch.bfloat16))
        assert (own - unquantised.model.layers[0].self_attn.k_proj.weight).abs().max() < 0.2
    model.train()(ids, labels=ids, ratio=4).loss.backward()
    assert beacon_gradient_norm(model) > 0
    with torch.no_grad():
        short = load().eval()(ids[:, :8]).logits
        assert torch.equal(model.eval()(ids[:, :8]).logits, short)


def test_packed_four_bit_weights_are_refused():
    """On CPUs with AVX512-BF16, a forward in eval mode packs the weights: copies would be noise, gradients zero."""
    base = make_base()
    model = get_peft_model(make_base(), make_config())
    for one in (base, model.base_model.model):
        for module in one.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)
    with pytest.raises(PoSEError, match=r"load_in_4bit: .* copying its weights"):
        get_peft_model(base, make_config())
    with pytest.raises(PoSEError, match=r"load_in_4bit: .* gradients"):
        model.train()(make_ids(20))


def test_tied_embeddings_stay_tied():
    base = make_base(tie_word_embeddings=True)
    ids = make_ids(20)
    model = get_peft_model(base, make_config())
    assert base.lm_head.weight is base.get_input_embeddings().base_layer.weight
    model(ids, labels=ids).loss.backward()
    assert base.lm_head.weight.grad is None


def test_dropped_tuner_is_noticed(tmp_path):
    """transformers' load_adapter keeps the layers and drops the tuner: PEFT refuses, or the first forward does."""
    make_beacon().save_pretrained(tmp_path)
    base = make_base()
    with pytest.raises(ValueError, match=r"shared state|have lost their tuner"):
        base.load_adapter(str(tmp_path))
        base(make_ids(5))


def test_copied_model_has_its_own_tuner():
    ids = make_ids(20)
    model = make_beacon()
    with torch.no_grad():
        expected = model(ids).logits
        twin = copy.deepcopy(model)
        del model
        assert torch.equal(twin(ids).logits, expected)
        assert find_tuner(twin).router.tuner() is find_tuner(twin)


def test_the_bare_model_refuses_a_beacon_cache():
    cache = BeaconCache()
    with pytest.raises(PoSEError, match="a BeaconCache was given to the bare model"):
        make_base()(make_ids(4), past_key_values=cache, use_cache=True)
    model = make_beacon()
    for read in (lambda ids: model(ids, past_key_values=cache), model.condense):
        with model.disable_adapter(), pytest.raises(PoSEError, match="a BeaconCache was given to the bare model"):
            read(make_ids(4))


BAD = [
    ({"interval": 1}, "interval: 1 must be a whole number ≥ 2"),
    ({"interval": 8.0}, "interval: 8.0 must be a whole number"),
    ({"window": 8}, "window: 8 must be a whole number ≥ 9"),
    ({"layout": "v3"}, "layout: 'v3' is not known; choose 'v1', 'v2'"),
    ({"mask": "causal"}, "mask: 'causal' is not known; choose 'stepwise', 'segmentation', 'full'"),
    ({"layout": "v2", "mask": "full"}, "have no effect in layout v2"),
    ({"ratio": "random"}, "ratio: 'random' is not known; choose 'adapt' or a number"),
    ({"ratio": 3}, "ratio: 3 must be a whole number ≥ 2 that divides the interval of 8"),
    ({"train_ratio": "often"}, "train_ratio: 'often' is not known; choose 'random', 'instance', 'adapt' or a number"),
    ({"ratios": [2, 3]}, "ratios: 3 must be a whole number"),
    ({"ratios": "2,4"}, "ratios: '2,4' must be a list of numbers"),
    ({"ratios": 8}, "ratios: 8 must be a list of numbers"),
    ({"attend_previous": "false"}, "attend_previous: 'false' is not known; choose True, False"),
    ({"task_type": "SEQ_CLS"}, "task_type: 'SEQ_CLS' is not known; choose 'CAUSAL_LM'"),
    ({"ratios": []}, r"ratios: \[\]"),
    ({"interval": 7}, "divides the interval of 7"),
    ({"rank": -1}, "rank: -1 must be a whole number ≥ 0"),
    ({"gradient_intervals": 0}, "gradient_intervals: 0 must be a whole number ≥ 1"),
    ({"dtype": "int8"}, "dtype: 'int8'"),
    ({"target_modules": ["k_proj", "embed_tokens"]}, r"target_modules: \['embed_tokens'\] would save the whole base"),
    ({"target_modules": "all-linear"}, "target_modules: 'all-linear'"),
    ({"target_modules": 5}, "target_modules: 5 must be a list of names"),
    ({"exclude_modules": [["q_proj"]]}, r"exclude_modules: \[\['q_proj'\]\] must be a list of names"),
    ({"target_modules": "("}, r"target_modules: '\(' is not a regular expression \(missing"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings(changes, message):
    with pytest.raises(PoSEError, match=message):
        make_config(**changes)


def test_values_that_json_cannot_hold_are_saved(tmp_path):
    """Otherwise the first checkpoint of a run would fail."""
    config = make_config(dtype=torch.float32, ratio=np.int64(4), train_ratio=np.int64(2), ratios=np.array([2, 4]))
    config.save_pretrained(tmp_path)
    loaded = BeaconConfig.from_pretrained(tmp_path)
    assert (loaded.dtype, loaded.ratio, loaded.train_ratio, loaded.ratios) == ("float32", 4, 2, [2, 4])


def test_default_candidates_follow_the_interval():
    assert make_config().ratios == [2, 4, 8]
    assert BeaconConfig().ratios == [2, 4, 8, 16, 32, 64, 128]


UNFIT = [
    ("flash_attention_2", {}, "'flash_attention_2' cannot use the mask of layout v1"),
    ("flex_attention", {}, "'flex_attention' cannot use the mask of layout v1"),
    ("sdpa", {"target_modules": ["q_proj", "o_proj"]}, "beacons need their own keys and values"),
    ("sdpa", {"target_modules": ["up_proj"]}, "names no attention projection"),
    ("sdpa", {"target_modules": r".*(embed_tokens|[kv]_proj)"}, "matches model.embed_tokens, which would be saved"),
    ("sdpa", {"target_modules": r".*lm_head|.*[kv]_proj"}, "matches lm_head, which would be saved"),
]


@pytest.mark.parametrize(("attention", "changes", "message"), UNFIT)
def test_unfit_models(attention, changes, message):
    model = make_base()
    model.config._attn_implementation = attention
    with pytest.raises(PoSEError, match=message):
        get_peft_model(model, make_config(**changes))


HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0}
LATENT = ("deepseek_v3 has multi-head latent attention", CONFIGS["deepseek_v3"])


@pytest.mark.parametrize(
    ("message", "make", "targets"),
    [
        ("qwen3_next has layers of kind linear_attention", lambda: small_config("qwen3_next", **HYBRID), None),
        # DeepSeek makes keys and values from one compressed row, for which no choice of projections works.
        *((*LATENT, each) for each in (None, ["q_b_proj", "kv_b_proj", "o_proj"], ["kv_a_proj_with_mqa", "kv_b_proj"])),
    ],
)
def test_families_that_cannot_be_condensed(message, make, targets):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make())
    with pytest.raises(PoSEError, match=message):
        get_peft_model(model, make_config(target_modules=targets))


def test_models_without_rope():
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1, n_positions=32))
    with pytest.raises(PoSEError, match="GPT2LMHeadModel has no q_proj"):
        get_peft_model(gpt, make_config())
    with pytest.raises(PoSEError, match="has 0 rotary embeddings"):
        get_peft_model(gpt, make_config(target_modules=["c_attn"]))


def test_rotation_in_another_convention_is_refused(monkeypatch):
    """A model that rotates neighbouring pairs: moved keys would silently be wrong."""
    from transformers.models.llama import modeling_llama

    def pairs(x):
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)

    monkeypatch.setattr(modeling_llama, "rotate_half", pairs)
    model = make_beacon()
    model.get_input_embeddings().weight.data[0] = 0  # as that of a padding token; its keys are then zero
    model(make_ids(8))  # nothing is moved yet
    with pytest.raises(PoSEError, match="layer 0 rotates keys in a way that cannot be moved"):
        model(make_ids(9))


def test_v2_takes_flash_attention_and_no_mask():
    """In layout v2 the model gets no explicit mask, so an attention that only knows "causal" can run it."""
    model = make_beacon(layout="v2")
    model(make_ids(30))  # measures once how keys are rotated
    seen = []
    hook = model.base_model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    with torch.no_grad():
        model(make_ids(30))
    hook.remove()
    assert seen == [None] * 4
    model.base_model.model.config._attn_implementation = "flash_attention_2"
    from pose_plugin.beacon.checks import check_attention

    check_attention("flash_attention_2", model.base_model.active_config)
