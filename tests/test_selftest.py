"""The self-test at startup: it passes if training can work, and names the right failure if not."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from pose_plugin import extend_context
from pose_plugin.attention import restart_boundaries
from pose_plugin.collator import PositionCollator
from pose_plugin.frameworks.trl import PoSECollator
from pose_plugin.selftest import SelfTestReport, self_test
from pose_plugin.utils.errors import PoSEError, SelfTestError
from tests.models import make_llama, make_tokenizer
from tests.test_collator import stack_packs

TARGET = 512


def model(**changes):
    return make_llama(max_position_embeddings=TARGET, **changes)


def collator(side="right", **settings):
    return PoSECollator(make_tokenizer(side=side), **{"target_length": TARGET, **settings})


def packing_collator():
    return PositionCollator(stack_packs, {"target_length": TARGET})


def padding_free_collator():
    trainer = pytest.importorskip("trl.trainer.sft_trainer")
    inner = trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return PositionCollator(inner, {"target_length": TARGET})


# --- passes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_good_model(attention, side, rows):
    report = self_test(model(attention=attention), collator(side), rows=rows)
    assert report.after_jump > 0.01 * report.same_chunk > 0
    # Ten times what counts as no effect.
    assert report.own_positions > 1e-3 * report.same_chunk
    assert (report.neighbour, report.other_row) == (0.0, 0.0)
    assert (report.packed, report.attention) == (False, attention)


@pytest.mark.parametrize(
    "make, pack", [(packing_collator, "lists"), (padding_free_collator, "seq_lengths")], ids=["lists", "trl"]
)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_with_the_rule(make, pack, rows, attention):
    with restart_boundaries():
        report = self_test(model(attention=attention), make(), pack=pack, rows=rows)
    assert report.after_jump > 0 and report.neighbour == 0.0 and report.packed


def test_dropout_and_lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    adapted = peft.get_peft_model(model(attention_dropout=0.0), config)
    assert self_test(adapted, collator()).neighbour == 0.0


class Float8Linear(torch.nn.Linear):
    """Rounds all tokens of a batch by one scale, as torchao's does."""

    def forward(self, tokens):
        scale = tokens.abs().mean() / 30
        return super().forward((tokens / scale).round() * scale)


def eight_bits():
    one = model()
    for module in one.model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Float8Linear
    return one


def test_rounding_that_rows_share_is_not_a_leak():
    report = self_test(eight_bits(), collator())
    assert report.other_row > 0 and report.shared_rounding
    with restart_boundaries():
        report = self_test(eight_bits(), packing_collator(), pack="lists")
    assert 0 < report.neighbour < 0.2 * report.after_jump


def test_a_leak_beyond_rounding():
    def all_ones(batch):
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    (point,) = points(sentence(Wrapped(eight_bits(), all_ones), packing_collator(), pack="lists"))
    assert "packed documents see each other" in point


def test_attention_dropout():
    self_test(model(attention="eager", attention_dropout=0.3), collator())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradient_checkpointing(reentrant):
    one = model()
    one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    self_test(one, collator())
    with restart_boundaries():
        self_test(one, packing_collator(), pack="lists")


def test_bf16():
    self_test(model().to(torch.bfloat16), collator())
    report = self_test(model(), collator(), autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert report.after_jump > 0


@pytest.mark.parametrize("target", [1, 2, 8, 23, 24, 25, 26, 64])
def test_small_targets(target):
    """If the target leaves no room for a jump, the test makes no statement about jumps."""
    self_test(model(), collator(target_length=target))


def test_content_and_seams_do_not_matter():
    self_test(model(), collator(train_length=4, content="skip"))


def test_a_custom_forward():
    one = model()
    seen = []

    def forward(batch):
        seen.append(sorted(batch))
        return one(**batch).logits

    self_test(one, collator(), forward=forward)
    assert seen == [["attention_mask", "input_ids", "position_ids"]] * 5


# --- fails ----------------------------------------------------------------------------------------------------


def sentence(*args, **kwargs):
    with pytest.raises(SelfTestError) as caught:
        self_test(*args, **kwargs)
    text = str(caught.value)
    assert text.startswith("PoSE self-test: ") and text.endswith("set self_test: false")
    return text


def points(text):
    return [line for line in text.splitlines() if line.startswith("- ")]


class OnlyAModule(torch.nn.Module):
    """As DistributedDataParallel: the config is the inner module's."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **batch):
        return self.module(**batch)


def test_a_wrapper_without_a_config():
    assert self_test(OnlyAModule(model(attention="eager")), collator()).attention == "eager"


class Wrapped(torch.nn.Module):
    """A wrapper that changes what the model gets."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.config, self.change = inner, inner.config, change

    def forward(self, **batch):
        return self.inner(**self.change(batch))


def without_mask(batch):
    return {**batch, "attention_mask": None}


def without_positions(batch):
    return {key: value for key, value in batch.items() if key != "position_ids"}


def of_row_0(batch):
    return {**batch, "position_ids": batch["position_ids"][:1].expand_as(batch["position_ids"])}


def test_a_mask_that_does_not_arrive():
    text = sentence(Wrapped(model(), without_mask), collator())
    (point,) = points(text)
    assert "chunk 2 does not see chunk 1 (change of logits 0, within chunk 1 0." in point
    assert "keep the attention_mask that PoSECollator returns" in point
    assert "Use attn_implementation sdpa, eager or flash_attention_2" in point
    assert "Measured with attn_implementation=sdpa, packed rows: False." in text


def test_packed_rows_without_the_rule():
    text = sentence(model(), packing_collator(), pack="lists")
    (point,) = points(text)
    assert "chunk 2 does not see chunk 1 (change of logits 0" in point
    assert "Turn packing off, or use attn_implementation" in point
    assert "packed rows: True." in text


def test_packed_rows_with_a_mask_leak():
    def all_ones(batch):
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    (point,) = points(sentence(Wrapped(model(), all_ones), packing_collator(), pack="lists"))
    assert "packed documents see each other (change of logits 0." in point
    assert "sample_packing: false; TRL: packing=False" in point


@pytest.mark.parametrize("rows", [1, 2])
def test_positions_that_are_ignored(rows):
    (point,) = points(sentence(Wrapped(model(), without_positions), collator(), rows=rows))
    assert "logits do not follow position_ids (change 0)" in point
    assert "liger_rope: false" in point


def test_a_rotary_kernel_that_counts_for_itself(monkeypatch):
    one = model()
    rotary = one.model.rotary_emb
    forward = rotary.forward

    def counting(x, position_ids, *args, **kwargs):
        return forward(x, torch.arange(x.shape[1])[None].expand(x.shape[0], -1), *args, **kwargs)

    monkeypatch.setattr(rotary, "forward", counting)
    (point,) = points(sentence(one, collator()))
    assert "logits do not follow position_ids" in point


WINDOW = 64


def extended():
    """A model that was extended from WINDOW to TARGET."""
    plain = make_llama(max_position_embeddings=WINDOW)
    return type(plain)(extend_context(plain.config, TARGET, "none"))


def wrapped(positions):
    return positions % WINDOW


def cut_off(positions):
    return positions.clamp(max=WINDOW - 1)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("change", [wrapped, cut_off])
def test_positions_of_the_old_window_only(change, rows):
    """The logits follow positions, but every distance is one that the base knows."""
    self_test(extended(), collator(), rows=rows)
    broken = Wrapped(extended(), lambda batch: {**batch, "position_ids": change(batch["position_ids"])})
    (point,) = points(sentence(broken, collator(), rows=rows))
    assert "logits do not follow position_ids" in point


def in_layer_1(change):
    """Change the positions that one of two layers sees."""
    one = extended()
    rotary = one.model.rotary_emb

    def before(module, args, kwargs):
        cos, _ = kwargs["position_embeddings"]
        seen = torch.zeros(cos.shape[:2], dtype=torch.long) if change is None else change(one.positions)
        return args, {**kwargs, "position_embeddings": rotary(cos, seen)}

    one.register_forward_pre_hook(
        lambda module, args, kwargs: setattr(one, "positions", kwargs["position_ids"]), with_kwargs=True
    )
    one.model.layers[1].self_attn.register_forward_pre_hook(before, with_kwargs=True)
    return one


@pytest.mark.parametrize("change", [None, wrapped])
def test_one_layer_that_does_not_follow_positions(change):
    self_test(in_layer_1(lambda positions: positions), collator())
    (point,) = points(sentence(in_layer_1(change), collator()))
    assert "1 attention layers do not follow position_ids" in point and "model.layers.1.self_attn" in point


def test_layers_that_are_planned_without_positions():
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.SmolLM3Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=TARGET, pad_token_id=0, no_rope_layers=[1, 1, 1, 0],
    )  # fmt: skip
    torch.manual_seed(0)
    planned = transformers.SmolLM3ForCausalLM(config)
    assert self_test(planned, collator()).deaf_layers == ()
    planned.model.layers[1].self_attn.use_rope = 0
    assert "model.layers.1.self_attn" in sentence(planned, collator())


def test_a_model_without_rotary_positions():
    """Liger's kernel is not the cause."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=2)
    without = Wrapped(BloomForCausalLM(config), without_positions)
    (point,) = points(sentence(without, collator()))
    assert "no rotary positions" in point and "Liger" not in point


def test_a_kernel_that_needs_a_gpu():
    """Axolotl turns its LoRA kernels on by itself."""

    def kernel(batch):
        raise AssertionError("Torch not compiled with CUDA enabled")

    (point,) = points(sentence(Wrapped(model(), kernel), collator()))
    for key in ("lora_mlp_kernel: false", "lora_qkv_kernel: false", "lora_o_kernel: false"):
        assert key in point


def test_other_errors_are_raised_as_they_are():
    def fail(batch):
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        self_test(Wrapped(model(), fail), collator())


def needs_weights(features):
    return {**stack_packs([[each] for each in features]), "weights": [each["weight"] for each in features]}


def replaces_tokens(features):
    batch = stack_packs([[each] for each in features])
    batch["input_ids"][:, ::5] = 1
    return batch


@pytest.mark.parametrize(
    "collate, words",
    [(needs_weights, r"failed.*KeyError: 'weight'.*input_ids, labels, attention_mask"), (replaces_tokens, "changes")],
)
def test_an_inner_collator_that_the_test_cannot_use(collate, words):
    with pytest.raises(PoSEError, match=rf"self-test: the inner collator .*{words}.*self_test: false"):
        self_test(model(), PoSECollator(collate=collate, target_length=TARGET))


def test_positions_of_row_0_used_for_all_rows():
    text = sentence(Wrapped(model(), of_row_0), collator())
    assert "one row's positions move another row's logits" in text
    assert "Turn it off (Liger: liger_rope: false), or use a batch of 1" in text
    # A batch of 1 is the fix.
    self_test(Wrapped(model(), of_row_0), collator(), rows=1)


def test_logits_that_are_not_finite():
    broken = model()
    with torch.no_grad():
        broken.lm_head.weight[40] = float("nan")
    (point,) = points(sentence(broken, collator()))
    assert point.startswith("- the logits are not finite (")


def test_logits_that_are_not_finite_far_out():
    """A cache of cos and sin that is read beyond its end gives nan in chunk 2 only."""
    one = model()
    forward = one.model.rotary_emb.forward

    def short(x, position_ids, *args, **kwargs):
        cos, sin = forward(x, position_ids, *args, **kwargs)
        return torch.where(position_ids[..., None] > 64, torch.nan, cos), sin

    one.model.rotary_emb.forward = short
    (point,) = points(sentence(one, collator()))
    assert point.startswith("- the logits are not finite (")


def test_a_model_that_ignores_its_input():
    empty = model()
    with torch.no_grad():
        empty.lm_head.weight.zero_()
    assert "do not depend on the tokens at all" in sentence(empty, collator())


def test_a_flattening_collator_without_the_rule():
    """Rows become one row, and transformers' own rule cuts its chunks apart."""
    from transformers import DataCollatorWithFlattening

    flat = PositionCollator(DataCollatorWithFlattening(), {"target_length": TARGET})
    (point,) = points(sentence(model(), flat))
    assert "chunk 2 does not see chunk 1" in point


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, []),
        ({"after_jump": 1e-6}, ["chunk 2 does not see chunk 1"]),
        ({"neighbour": 0.1}, ["packed documents see each other"]),
        ({"own_positions": None}, []),
        ({"own_positions": 0.0}, ["do not follow position_ids"]),
        ({"other_row": 0.1}, ["move another row's logits"]),
        ({"same_chunk": 0.0, "after_jump": 0.0}, ["do not depend on the tokens"]),
        ({"after_jump": 0.0, "neighbour": 0.1}, ["chunk 2 does not see", "see each other"]),
        ({"after_jump": 0.0, "own_positions": 0.0}, ["chunk 2 does not see"]),
        ({"own_positions": 0.0, "other_row": 0.1}, ["move another row's logits"]),
        ({"neighbour": float("nan")}, ["not finite"]),
        ({"after_jump": float("inf")}, ["not finite"]),
    ],
)
def test_problems_of_a_report(changes, words):
    good = {"same_chunk": 0.5, "after_jump": 0.05, "neighbour": 0.0, "own_positions": 0.05, "other_row": 0.0}
    report = SelfTestReport(**{**good, **changes}, packed=False, attention="sdpa")
    found = report.problems()
    assert len(found) == len(words)
    assert all(word in problem for word, problem in zip(words, found, strict=True))


@pytest.mark.parametrize("own, packed, parts", [(0.05, True, 4), (None, False, 2)])
def test_a_report_as_text(own, packed, parts):
    report = SelfTestReport(0.5, 0.04, 0.0, own, 0.0, packed=packed, attention="sdpa")
    assert str(report).endswith("(sdpa)") and "0.5 in chunk 1, 0.04 in chunk 2" in str(report)
    assert len(re.findall(r"0\.?\d* in|up to 0\.05", str(report))) == parts


# --- no side effects ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_no_side_effects(fails):
    one = model(attention_dropout=0.1)
    one.eval()
    one.model.layers[1].train()
    one.lm_head.weight.grad = torch.ones_like(one.lm_head.weight)
    tested = Wrapped(one, without_mask if fails else dict)
    tested.train(False)
    one.model.layers[1].train()
    modes = [module.training for module in tested.modules()]
    weights = {name: value.clone() for name, value in tested.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    collate = collator(train_length=64)
    collate.set_epoch(4)
    if fails:
        sentence(tested, collate)
    else:
        self_test(tested, collate)
    assert [module.training for module in tested.modules()] == modes
    assert len(set(modes)) == 2
    assert all(torch.equal(weights[name], value) for name, value in tested.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert collate.trained()["documents"] == 0 and collate.epoch == 4 and collate.training
    grads = {name for name, weight in tested.named_parameters() if weight.grad is not None}
    assert grads == {"inner.lm_head.weight"}
    assert torch.equal(one.lm_head.weight.grad, torch.ones_like(one.lm_head.weight))
    assert torch.is_grad_enabled()
