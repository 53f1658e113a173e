"""Published models: each base is read as its class reads it, and every kind of RoPE extends it or says why not.

The models are tiny, with the published head dimensions, frequencies, windows and kinds of layers (tests/published.py).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from pose_plugin.checkpoints.saved import read_saved
from pose_plugin.collator import PositionCollator
from pose_plugin.export import ENGINES, exporter
from pose_plugin.plan.config_reader import from_values
from pose_plugin.plan.plan import make_plan
from pose_plugin.plan.report import text
from pose_plugin.rope import apply_plan, plan_rope, theory, verify_rope
from pose_plugin.rope.read import text_config
from pose_plugin.rope.source import read_rope
from pose_plugin.selftest import self_test
from pose_plugin.utils.errors import PoSEError
from tests.published import FACTORS, MESSAGES, Published, build, extensions, published, shrunken
from tests.published_page import PAGE, page
from tests.test_attention import stack_single

# Many bases have the same window and head dimension.
SEARCH = functools.cache(theory.retrieval_base)
BASES = published()
EXTENDED = [base for base in BASES if not base.refused]


def cases(bases: Iterable[Published]) -> list[Any]:
    return [pytest.param(base, id=base.model) for base in bases]


def far_frequencies(model: Any) -> torch.Tensor:
    """Return the live frequencies of the layers that see far, shape [d / 2]; a proportional rope ends with zeros."""
    (buffer, *rest) = [
        buffer.double()
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and "sliding" not in name
    ]
    assert all(torch.equal(buffer, other) for other in rest)
    return buffer


def slowest(model: Any) -> float:
    live = far_frequencies(model)
    return float(live[live > 0].min())


def request_for(kind: str, factor: int, model: Any, folder: Path) -> dict[str, Any]:
    """Return the `rope:` block of a kind; a base or lists are such that the slowest pair is stretched by `factor`."""
    live = far_frequencies(model)
    turning = int((live > 0).sum())
    if kind == "base":
        return {"type": kind, "theta": float((factor / slowest(model)) ** (len(live) / (turning - 1)))}
    if kind == "longrope":
        lists = np.geomspace(1.0, factor / slowest(model), len(live)).tolist()
        file = folder / "factors.json"
        file.write_text(json.dumps({"long_factor": lists, "short_factor": lists}))
        return {"type": kind, "factors_file": str(file)}
    return {"type": kind}


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("base", cases({base.model_type: base for base in EXTENDED}.values()))
def test_the_plan_is_printed(base, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(base.config))
    kind = next(kind for kind in ("yarn", "linear") if kind not in base.unlike)
    pose = {"target_length": 8 * base.window, "rope": kind}
    values = {"base_model": str(tmp_path), "sequence_len": 64, "pose": pose, "max_steps": 10, "adapter": "lora"}
    printed = text(make_plan(from_values(values), draws=1))
    assert f"window {base.window}" in printed and f"window {8 * base.window}" in printed


@pytest.mark.once
@pytest.mark.docs
def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.published_page"


def rotating(model: Any) -> list[bool]:
    """Run each attention layer with the rotation reversed, and return whether its output changes."""
    calls = []
    hooks = [
        module.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
        for module in model.modules()
        if type(module).__name__.endswith("Attention")
    ]
    ids = torch.arange(8)[None] + 3
    with torch.no_grad():
        model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        for hook in hooks:
            hook.remove()
        found = []
        for module, arguments, keywords in calls:
            given = keywords["position_embeddings"]
            reversed_rope = (given[0], -given[1]) if isinstance(given, tuple) else given.conj()
            one = module(*arguments, **keywords)[0]
            other = module(*arguments, **keywords | {"position_embeddings": reversed_rope})[0]
            found.append(not torch.equal(one, other))
    return found


@pytest.mark.parametrize("base", cases(BASES))
def test_a_base_is_read_as_its_class_reads_it(base):
    """The closed form of what is read equals the frequencies that the class computes from the published fields.

    Layers that are read as rotating do rotate, and no others do.
    """
    if base.refused:
        with pytest.raises(PoSEError, match=MESSAGES[base.refused]):
            plan_rope(base.full, 8 * (base.window or 2048))
        if base.refused != "far layers":
            return
    model = build(small := shrunken(base.full))
    reach = [kind for kind in read_rope(small).reach if kind.attends]
    live = rotating(model)
    assert len(live) == sum(kind.layers for kind in reach)
    assert sum(live) == sum(kind.layers for kind in reach if kind.rotates)
    if base.refused:
        return
    report = verify_rope(model)
    plan = plan_rope(base.full, base.window, "none")
    assert {check.rope_type for check in report.checks} >= {plan.current["rope_type"]}
    assert plan.original_length == base.original
    assert sum(kind.layers for kind in plan.reach) == text_config(base.full).num_hidden_layers


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("base", cases(EXTENDED))
def test_every_kind(base, tmp_path, monkeypatch):
    monkeypatch.setattr(theory, "retrieval_base", SEARCH)
    before = slowest(model := build(shrunken(base.full)))
    for kind, reason in ({"dynamic": "dynamic"} | base.unlike).items():
        rope = request_for(kind, 2, model, tmp_path)
        with pytest.raises(PoSEError, match=MESSAGES[reason]):
            plan_rope(base.full, 2 * base.window, rope)
    for kind, factor in extensions(base):
        extends(base, request_for(kind, factor, model, tmp_path), before, factor, tmp_path)


def extends(base: Published, rope: dict[str, Any], before: float, factor: int, folder: Path) -> None:
    where, target = f"{rope['type']} × {factor}", factor * base.window
    plan = plan_rope(base.full, target, rope)
    config = apply_plan(base.full, plan)
    config.save_pretrained(folder / "model")
    reloaded = AutoConfig.from_pretrained(folder / "model")
    assert text_config(reloaded).rope_parameters == text_config(config).rope_parameters, where
    model = build(shrunken(reloaded))
    verify_rope(model, plan)
    after = slowest(model)
    if rope["type"] == "none":
        assert after == before, where
    else:
        # `auto` may not need the whole factor. A blend need not stretch pairs that turn within the window.
        blended = rope["type"] in ("yarn", "yarn-revised", "llama3") and 2 * math.pi / before < base.window
        least = (1.0 if blended or rope["type"] == "auto" else factor) * (1 - 1e-5)
        assert before / after >= least, f"{where}: the slowest pair is stretched by {before / after:.3f}"
    if factor != max(FACTORS):
        return
    ids = torch.arange(6)[None] + 3
    positions = torch.tensor([[0, 1, 2, target - 3, target - 2, target - 1]])
    with torch.no_grad():
        logits = model(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False).logits
    assert logits.isfinite().all(), where
    if rope["type"] == "yarn":
        self_test(model, PositionCollator(stack_single, {"target_length": target, "train_length": 64}))
    if rope["type"] != "none":
        exports(folder / "model", where)


def exports(folder: Path, where: str) -> None:
    """Every engine gets its lines, or an error that names the rope type which it does not compute."""
    saved = read_saved(folder)
    for engine in ENGINES:
        try:
            made = exporter(engine)(saved)
        except PoSEError as error:
            assert f"rope_type={saved.kind}" in str(error), (where, engine)
        else:
            # Only these two need the window on the command line.
            assert made.lines and (engine not in ("vllm", "sglang") or str(saved.maximum) in made.lines[0]), (
                where,
                engine,
            )
