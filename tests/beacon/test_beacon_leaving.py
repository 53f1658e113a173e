"""A condensed text as an ordinary cache and as a PEFT Cartridge: read by the plain base model, without this package."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from pose_plugin.beacon import BeaconCache, save_cartridge
from pose_plugin.utils.errors import PoSEError
from tests.forked import LIMIT
from tests.models import ARCHITECTURES, make_base, make_beacon, make_ids

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("layout", ["v1", "v2"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_the_plain_model_reads_on_bit_for_bit(architecture, layout):
    """Until the open interval is full (v1) or has its next beacon (v2)."""
    model, base = make_beacon(architecture, layout=layout), make_base(architecture)
    question = make_ids(3, seed=5)
    context = model.condense(make_ids(45))
    key = model.base_model.cache_key
    read = 3 if layout == "v1" else 1
    expected = model(question[:, :read], context=context).logits
    past = context.to_dynamic_cache()
    assert past.get_seq_length() == context.len_memory + context.len_tail
    assert torch.equal(base(question[:, :read], **{key: past}, use_cache=True).logits, expected)
    # In stock `generate`, a mask over past and question shows that the question is all new.
    past = context.to_dynamic_cache()
    mask = torch.ones(1, past.get_seq_length() + 1, dtype=torch.long)
    how = {"return_dict_in_generate": True, "output_logits": True, **GREEDY}
    out = base.generate(question[:, :1], attention_mask=mask, **{key: past}, max_new_tokens=read, **how)
    own = model.generate(question[:, :1], context=context, max_new_tokens=read, **how)
    assert torch.equal(out.sequences, own.sequences)
    assert all(torch.equal(a, b) for a, b in zip(out.logits, own.logits, strict=True))
    assert context.tokens == 45


def test_a_cartridge_is_read_without_this_package(tmp_path):
    """PEFT loads the folder in a process that cannot import pose_plugin."""
    model, question = make_beacon(), make_ids(3, seed=5)
    make_base().save_pretrained(tmp_path / "base")
    context = model.condense(make_ids(45))
    save_cartridge(context, model, tmp_path / "document")
    expected = model.generate(question, context=context, max_new_tokens=1, **GREEDY)
    torch.save(
        {"ids": question, "logits": model(question, context=context).logits, "answer": expected}, tmp_path / "own"
    )
    script = f"""
        import inspect, sys
        sys.modules["pose_plugin"] = None
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        own = torch.load({str(tmp_path / "own")!r})
        base = AutoModelForCausalLM.from_pretrained({str(tmp_path / "base")!r})
        model = PeftModel.from_pretrained(base, {str(tmp_path / "document")!r}).eval()
        with torch.no_grad():
            logits = model(input_ids=own["ids"]).logits
        assert (logits - own["logits"]).abs().max() <= 1e-5, (logits - own["logits"]).abs().max()
        how = {{"attention_mask": torch.ones_like(own["ids"]), "max_new_tokens": 1, "do_sample": False}}
        answer = model.generate(input_ids=own["ids"], eos_token_id=None, pad_token_id=0, **how)
        # In transformers 5.24, PEFT 0.21's own generate loses every prefix.
        if "cache" not in inspect.signature(type(base).forward).parameters:
            assert torch.equal(answer, own["answer"])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_cannot_leave(tmp_path):
    model = make_beacon()
    with pytest.raises(PoSEError, match="cache: it is empty"):
        BeaconCache().to_dynamic_cache()
    with pytest.raises(PoSEError, match="cache: it holds 2 texts"):
        save_cartridge(model.condense(make_ids(20, rows=2)), model, tmp_path)
