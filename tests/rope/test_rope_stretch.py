"""Each kind of `rope.type`: one row. A kind added to `KINDS` needs its row here, and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pose_plugin.config import RopeSettings, parse_settings
from pose_plugin.rope import extend_context, inverse_frequencies, kinds, plan_rope, theory, verify_rope
from pose_plugin.rope.stretch import KINDS, RopeKind, as_list
from pose_plugin.utils.errors import PoSEError
from tests.models import CONFIGS, WINDOW, build, logits

TARGET, FACTOR, DIM, THETA = 1024, 16.0, 32, 1e4
PLAIN = kinds.plain_frequencies(THETA, DIM)
RAMP = kinds.yarn_ramp(THETA, DIM, WINDOW)
NTK = THETA * FACTOR ** (DIM / (DIM - 2))
YARN_SCALE = kinds.yarn_attention_factor(FACTOR)


def _llama3() -> np.ndarray:
    turns = WINDOW * PLAIN / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    return kept * PLAIN + (1 - kept) * PLAIN / FACTOR


# kind: (further settings, frequencies of a Llama with base 1e4 and 32 rotated dimensions, scale of cos and sin)
ROWS = {
    "linear": ({}, PLAIN / FACTOR, 1.0),
    "ntk": ({}, kinds.plain_frequencies(NTK, DIM), 1.0),
    "base": ({"theta": 2e8}, kinds.plain_frequencies(2e8, DIM), 1.0),
    "yarn": ({}, PLAIN * (1 - RAMP) + PLAIN / FACTOR * RAMP, YARN_SCALE),
    "yarn-revised": ({}, PLAIN / ((1 - RAMP) + FACTOR * RAMP), YARN_SCALE),
    "llama3": ({}, _llama3(), 1.0),
    "longrope": ({"factors_file": "factors.json"}, PLAIN / 3.0, kinds.longrope_attention_factor(FACTOR, WINDOW)),
    "auto": ({}, kinds.plain_frequencies(max(theory.retrieval_base(TARGET, DIM), NTK), DIM), 1.0),
    "none": ({}, PLAIN, 1.0),
}
NOT_FOR_TRAINING = {"dynamic"}


@pytest.fixture(autouse=True)
def factors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "factors.json").write_text(json.dumps({name: [3.0] * 16 for name in ("long_factor", "short_factor")}))


def lives(rope, frequencies, scale, folder) -> None:
    """Plan, extend, build, verify, save, reload: the model has these frequencies throughout."""
    plan = plan_rope(CONFIGS["llama"](), TARGET, rope)
    assert plan.current["rope_type"] in kinds.CLOSED_FORMS
    got, got_scale = inverse_frequencies(plan.current, DIM, max_position_embeddings=TARGET)
    np.testing.assert_allclose(got, frequencies, rtol=1e-12)
    assert got_scale == pytest.approx(scale)
    model = build(extend_context(CONFIGS["llama"](), TARGET, rope))
    verify_rope(model, plan)
    model.save_pretrained(folder)
    assert AutoConfig.from_pretrained(folder).pose_plugin == plan.record
    reloaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    verify_rope(reloaded, plan)
    np.testing.assert_allclose(reloaded.model.rotary_emb.inv_freq.double().numpy(), frequencies, rtol=1e-4)
    assert torch.equal(logits(model, [0, 1, 900]), logits(reloaded, [0, 1, 900]))


def test_every_kind_has_a_row():
    assert set(ROWS) | NOT_FOR_TRAINING == set(KINDS)


@pytest.mark.parametrize("name", ROWS)
def test_kind(name, tmp_path):
    settings, frequencies, scale = ROWS[name]
    lives({"type": name, **settings}, frequencies, scale, tmp_path / "model")


def test_a_new_kind_is_one_row(monkeypatch, tmp_path):
    """Settings, plan, config, verification and model card know it from its row."""
    from pose_plugin.export.card import write_card
    from tests.models import save_full

    half = RopeKind(
        "half-linear",
        "half of linear interpolation",
        lambda request: as_list(request, 1.25, [(1 + request.factor) / 2] * (request.dim // 2)),
        paper="1234.56789",
    )
    with pytest.raises(PoSEError, match="half-linear"):
        parse_settings({"target_length": TARGET, "rope": "half-linear"})
    monkeypatch.setitem(KINDS, half.name, half)
    lives("half-linear", PLAIN / 8.5, 1.25, tmp_path / "model")
    with pytest.raises(PoSEError, match=r"rope\.beta_fast=16"):
        parse_settings({"target_length": TARGET, "rope": {"type": "half-linear", "beta_fast": 16}})
    save_full(tmp_path / "saved", "half-linear")
    card = write_card(tmp_path / "saved")
    assert card is not None and "half of linear interpolation ([arXiv 1234.56789]" in card.read_text()


@pytest.mark.parametrize("name", KINDS)
def test_settings_that_a_kind_does_not_read_are_refused(name):
    """A setting without effect would silently train something else than its user expects."""
    kind, needed = KINDS[name], ROWS.get(name, ({}, None, None))[0]
    values = {"factor": 2.0, "theta": 1e6, "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0}
    values |= {"low_freq_factor": 2.0, "high_freq_factor": 8.0, "factors_file": "factors.json"}
    assert values.keys() | {"type", "original_length"} == RopeSettings.model_fields.keys()
    for key, value in values.items():
        rope = {"type": name, **needed, key: value}
        if key in (*kind.settings, *kind.required):
            parse_settings({"target_length": TARGET, "rope": rope})
        else:
            with pytest.raises(PoSEError, match=rf"rope\.{key}="):
                parse_settings({"target_length": TARGET, "rope": rope})


@pytest.mark.parametrize(("name", "key"), [("base", "theta"), ("longrope", "factors_file")])
def test_settings_that_a_kind_needs(name, key):
    with pytest.raises(PoSEError, match=rf"rope\.type={name} .*rope\.{key}"):
        parse_settings({"target_length": TARGET, "rope": name})
