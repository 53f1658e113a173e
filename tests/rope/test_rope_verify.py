"""Real models: the planned frequencies are live, before and after a reload, and every mistake is caught."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config, GPT2Config, GPTJConfig, LlamaConfig

from pose_plugin.rope import extend_context, inverse_frequencies, plan_rope, verify_rope
from pose_plugin.utils.errors import PoSEError, RopeMismatchError
from tests.models import CONFIGS, ROTARY_DIM, SMALL, WINDOW, build, logits
from tests.rope.plans import settings

TARGET = 1024
KINDS = ["linear", "ntk", "base", "yarn", "yarn-revised", "llama3", "auto"]
FAR = [*range(8), *range(WINDOW + 500, WINDOW + 508)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_extend_build_verify(name, kind):
    config = extend_context(CONFIGS[name](), TARGET, settings(kind))
    report = verify_rope(build(config))
    assert {check.frequencies for check in report.checks} == {ROTARY_DIM[name] // 2}
    assert report.max_position_embeddings == TARGET
    layers = {check.layer_type for check in report.checks}
    assert layers == ({"full_attention", "sliding_attention"} if name in ("gemma3", "olmo3") else {None})
    assert report.checks[0].module in str(report)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_changed_after_the_model_was_built_is_caught(name, kind):
    model = build(CONFIGS[name]())
    verify_rope(model)
    plan = plan_rope(model.config, TARGET, settings(kind))
    model.config.rope_parameters = plan.rope_parameters
    model.config.max_position_embeddings = TARGET
    with pytest.raises(RopeMismatchError) as error:
        verify_rope(model)
    layer = "full_attention_" if plan.layer_type else ""
    assert f"rotary_emb.{layer}inv_freq[" in str(error.value)
    assert "from_pretrained(base, config=extend_context" in str(error.value)


@pytest.mark.parametrize("kind", ["yarn", "yarn-revised", "ntk"])
@pytest.mark.parametrize("name", CONFIGS)
def test_reloaded_without_us_the_model_computes_the_same(name, kind, tmp_path):
    config = extend_context(CONFIGS[name](), TARGET, kind)
    model = build(config)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    far = logits(model, FAR)
    assert torch.equal(far, logits(reloaded, FAR))
    verify_rope(reloaded, config)
    # The comparison can fail: without the rope the same weights compute something else.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, config=CONFIGS[name](), attn_implementation="eager")
    assert not torch.equal(far, logits(plain.eval(), FAR))


@pytest.mark.parametrize("expected", ["plan", "config", "dict", "parameters"])
def test_an_adapters_plain_base_is_caught_with_every_form_of_expectation(expected):
    base = LlamaConfig(**SMALL)
    plan, config = plan_rope(base, TARGET), extend_context(base, TARGET)
    wanted = {"plan": plan, "config": config, "dict": config.to_dict(), "parameters": plan.rope_parameters}
    verify_rope(build(config), wanted[expected])
    with pytest.raises(RopeMismatchError):
        verify_rope(build(base), wanted[expected])


def test_first_differing_dimension_value_and_wanted_are_named():
    model = build(LlamaConfig(**SMALL))
    with torch.no_grad():
        model.model.rotary_emb.inv_freq[5] *= 1.001
    with pytest.raises(RopeMismatchError) as error:
        verify_rope(model)
    want = 1e4 ** (-10 / 32)
    assert f"model.rotary_emb.inv_freq[5] is {want * 1.001:.6f}"[:-1] in str(error.value)
    assert f"{want:.6f}"[:-1] in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), 0.0, 1e30])
def test_an_unfilled_buffer_is_caught(value):
    model = build(LlamaConfig(**SMALL))
    model.model.rotary_emb.inv_freq.fill_(value)
    with pytest.raises(RopeMismatchError, match="inv_freq"):
        verify_rope(model)


def test_a_wrong_attention_factor_is_caught():
    model = build(extend_context(LlamaConfig(**SMALL), TARGET, "yarn"))
    model.model.rotary_emb.attention_scaling = 1.0
    with pytest.raises(RopeMismatchError, match=r"scaled by 1, .*1\.277"):
        verify_rope(model)


def test_a_sliding_layer_that_was_stretched_too_is_caught():
    config = extend_context(CONFIGS["gemma3"](), TARGET)
    plan = plan_rope(CONFIGS["gemma3"](), TARGET)
    config.rope_parameters["sliding_attention"] = dict(plan.current)
    with pytest.raises(RopeMismatchError, match="sliding_attention_inv_freq"):
        verify_rope(build(config), plan)


def test_a_maximum_that_was_not_raised_is_caught():
    plan = plan_rope(LlamaConfig(**SMALL), TARGET)
    config = LlamaConfig(**SMALL, rope_parameters=plan.rope_parameters)
    with pytest.raises(RopeMismatchError, match=f"max_position_embeddings={WINDOW} .*{TARGET}"):
        verify_rope(build(config), plan)


def test_a_wrong_rotary_dimension_is_caught():
    other = extend_context(LlamaConfig(**{**SMALL, "head_dim": 16}), TARGET)
    with pytest.raises(RopeMismatchError, match="16 frequencies"):
        verify_rope(build(extend_context(LlamaConfig(**SMALL), TARGET)), other)


def test_two_ropes_in_one_config_are_caught():
    config = extend_context(LlamaConfig(**SMALL), TARGET, "yarn")
    config.rope_parameters = {**config.rope_parameters, "factor": 4.0}
    with pytest.raises(RopeMismatchError, match="rope_scaling="):
        verify_rope(build(config))


@pytest.mark.parametrize("theta", [1e4, 5e5, 2e8])
@pytest.mark.parametrize("target", [2 * WINDOW, 64 * WINDOW, 1024 * WINDOW])
@pytest.mark.parametrize("kind", ["yarn", "llama3", "yarn-revised"])
def test_the_tolerance_admits_float32_and_nothing_else(kind, target, theta):
    config = LlamaConfig(**{**SMALL, "head_dim": 128}, rope_theta=theta)
    model = build(extend_context(config, target, kind))
    verify_rope(model)
    with pytest.raises(RopeMismatchError):  # the factor is off by a thousandth
        verify_rope(model, plan_rope(config, target, {"type": kind, "factor": target / WINDOW * 1.001}))


# --- number formats and devices ------------------------------------------------------------------------


def test_a_bf16_model_keeps_float32_frequencies_and_tells_far_neighbours_apart():
    config = extend_context(LlamaConfig(**SMALL), 131072, "yarn")
    model = build(config, dtype=torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    verify_rope(model)
    frequencies, attention = inverse_frequencies(config.rope_parameters, 32)
    positions = torch.tensor([[256, 257, 131070, 131071]])
    cos, sin = model.model.rotary_emb(torch.zeros(1, 4, 64, dtype=torch.bfloat16), positions)
    angles = positions[0].numpy()[:, None] * frequencies
    # bf16 rounds the result by 2^-9; the float32 product of 131071 radians is off by up to 0.008.
    for got, want in [(cos, np.cos(angles)), (sin, np.sin(angles))]:
        np.testing.assert_allclose(got[0, :, :16].double().numpy(), want * attention, atol=0.015)
    assert not torch.equal(cos[0, 0], cos[0, 1])
    assert not torch.equal(cos[0, 2], cos[0, 3])
    for layer in model.model.layers:  # random weights attend to everything alike; sharpen them
        layer.self_attn.q_proj.weight.data *= 10
        layer.self_attn.k_proj.weight.data *= 10
    near, far = logits(model, [0, 1, 256]), logits(model, [0, 1, 131070])
    assert not torch.equal(near[0, -1], logits(model, [0, 1, 257])[0, -1])
    assert not torch.equal(far[0, -1], logits(model, [0, 1, 131071])[0, -1])


def test_a_model_cast_to_bf16_as_a_whole_is_caught():
    assert torch.tensor(256.0).bfloat16() == torch.tensor(257.0).bfloat16()
    model = build(extend_context(LlamaConfig(**SMALL), TARGET)).to(torch.bfloat16)
    with pytest.raises(RopeMismatchError, match=r"bfloat16.*256 from 257"):
        verify_rope(model)


def test_weights_on_meta_are_not_read():
    model = build(extend_context(LlamaConfig(**SMALL), TARGET))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.to("meta"))
    assert verify_rope(model).max_position_embeddings == TARGET


def test_a_buffer_on_meta_is_caught():
    with torch.device("meta"):
        model = build(extend_context(LlamaConfig(**SMALL), TARGET))
    with pytest.raises(RopeMismatchError, match="meta device"):
        verify_rope(model)


def test_a_4_bit_model(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = extend_context(LlamaConfig(**SMALL), TARGET)
    build(config).save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, device_map="cpu")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    verify_rope(model, config)


def test_wrapped_models():
    peft = pytest.importorskip("peft")
    model = build(extend_context(LlamaConfig(**SMALL), TARGET))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert verify_rope(wrapped).checks[0].module.endswith("rotary_emb.inv_freq")

    class Parallel(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    assert verify_rope(Parallel(wrapped)).max_position_embeddings == TARGET


def test_only_the_text_part_of_a_multimodal_model_is_held_to_the_plan():
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**SMALL, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 32}
    config = extend_context(Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28}), TARGET)
    from transformers import Gemma3ForConditionalGeneration

    report = verify_rope(Gemma3ForConditionalGeneration(config))
    assert {check.layer_type for check in report.checks} == {"full_attention", "sliding_attention"}


def test_gptj_keeps_a_table():
    small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8, "vocab_size": 48}
    config = extend_context(GPTJConfig(**small, n_positions=64), 128, "none")
    model = build(config)
    assert verify_rope(model).checks[0].frequencies == 4
    with pytest.raises(RopeMismatchError, match=r"64 positions.*128"):
        short = build(GPTJConfig(**small, n_positions=64))
        short.config.n_positions = 128
        verify_rope(short)
    # In each layer up to transformers 5.23, in a separate module from 5.24 on.
    owner = next(module for module in model.modules() if getattr(module, "embed_positions", None) is not None)
    owner.embed_positions[1, 2] *= 1.01
    with pytest.raises(RopeMismatchError, match=r"embed_positions\[2\]"):
        verify_rope(model)


def test_a_model_without_rope_is_refused():
    model = build(GPT2Config(n_embd=16, n_layer=1, n_head=1, vocab_size=48))
    with pytest.raises(PoSEError, match="gpt2"):
        verify_rope(model)


# --- longrope switches lists by the largest position ------------------------------------------------------


def test_yarn_revised_has_the_same_frequencies_for_near_and_far_batches():
    model = build(extend_context(LlamaConfig(**SMALL), TARGET, "yarn-revised"))
    seen = []
    for positions in ([0, 1, 2], [0, 1, 900], [0, 1, 2]):
        logits(model, positions)
        seen.append(model.model.rotary_emb.inv_freq.clone())
        verify_rope(model)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])


def test_longrope_from_a_file_follows_the_largest_position_of_the_batch(tmp_path):
    long, short = [2.0 + i for i in range(16)], [1.0] * 16
    path = tmp_path / "factors.json"
    path.write_text(json.dumps({"long_factor": long, "short_factor": short}))
    model = build(extend_context(LlamaConfig(**SMALL), TARGET, "longrope", factors_file=str(path)))
    plain = torch.tensor(inverse_frequencies({"rope_type": "default", "rope_theta": 1e4}, 32)[0])
    for last, divisors in [(WINDOW - 1, short), (WINDOW, long), (900, long), (1, short)]:
        # Three tokens each time: the list follows the positions, not the number of tokens.
        logits(model, [0, 1, last] if last > 1 else [0, 1])
        live = model.model.rotary_emb.inv_freq.double()
        torch.testing.assert_close(live, plain / torch.tensor(divisors).double(), rtol=1e-6, atol=0)
        verify_rope(model)
    logits(model, [0, 1, 900])
    model.model.rotary_emb.inv_freq[0] = 1.0  # the first of the short list among the long
    with pytest.raises(RopeMismatchError, match=r"inv_freq\[0\]"):
        verify_rope(model)
