"""A trainer reports what its base will do, by the function that `plan`, Axolotl and `extend_context` use."""

from __future__ import annotations

import logging

from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from pose_plugin import PoSECollator, extend_context
from pose_plugin.rope import base_findings
from pose_plugin.utils.log import log
from tests.models import SMALL, make_tokenizer


def test_a_sliding_window_below_the_target_is_reported_at_the_start(tmp_path, caplog, monkeypatch):
    config = Qwen2Config(
        **SMALL,
        use_sliding_window=True,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
    )
    config = extend_context(config, 512)
    rows = [{"input_ids": list(range(3, 35)), "labels": list(range(3, 35))}] * 2
    caplog.clear()
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    with caplog.at_level(logging.WARNING, logger="pose_plugin"):
        Trainer(
            model=Qwen2ForCausalLM(config),
            args=TrainingArguments(tmp_path, max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True),
            train_dataset=rows,
            data_collator=PoSECollator(make_tokenizer(), target_length=512, train_length=32),
        ).train()
    (found,) = base_findings(config, 512)
    assert found.key == "sliding_window" and found.value == 32
    assert str(found) in caplog.text
