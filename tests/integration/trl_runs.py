"""Tiny real runs of TRL and of the transformers Trainer on CPU, and a record of what the model was given."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.forked import made_once
from tests.integration.records import Document, documents_of, logits_far_out
from tests.models import is_save_probe, make_llama, save

TARGET, WINDOW, ROWS, EPOCHS = 512, 64, 8, 2
STEPS = ROWS // 2
# Assistant answers, and nothing else, between {% generation %} and {% endgeneration %}; a space at
# their end is no token, and the mask would then run on to the end of the row.
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + ' w2' }}"
    "{% endgeneration %}{{ ' ' }}{% else %}{{ 'w3 ' + m['content'] + ' w4 ' }}{% endif %}{% endfor %}"
)


def words(picker: random.Random, count: int) -> str:
    """None begins as w0, w1 or w2, at which the tokenizer splits, as they are special."""
    return " ".join(f"w{picker.randrange(30, 100)}" for _ in range(count))


def texts(count: int = ROWS) -> list[dict[str, Any]]:
    picker = random.Random(0)
    return [{"text": words(picker, 20 + 3 * i)} for i in range(count)]


def chats() -> list[dict[str, Any]]:
    picker = random.Random(0)
    return [
        {
            "messages": [
                {"role": role, "content": words(picker, 6)} for role in ("user", "assistant", "user", "assistant")
            ]
        }
        for _ in range(ROWS)
    ]


def make_model(folder: Path, extended: bool = True, attention: str = "sdpa", **shape: Any) -> tuple[Any, Any]:
    """The base in `folder/base` (made once), built for the target, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from pose_plugin import extend_context

    base = made_once(folder / "base", lambda path: save(make_llama(**shape), path))
    config = AutoConfig.from_pretrained(base)
    if extended:
        config = extend_context(config, target_length=TARGET, rope="yarn")
    model = AutoModelForCausalLM.from_pretrained(base, config=config, attn_implementation=attention)
    return model, AutoTokenizer.from_pretrained(base)


def sft(
    folder: Path,
    *,
    rows: list[dict[str, Any]] | None = None,
    pose: dict[str, Any] | None = None,
    peft: Any = None,
    extended: bool = True,
    attention: str = "sdpa",
    chat_template: str | None = None,
    collate: Any = None,
    share: Any = None,
    shape: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """An SFTTrainer of 2 epochs of 4 steps; `share` is a collator that was used before."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from pose_plugin import PoSECollator

    values = {
        "output_dir": str(folder / "out"),
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_length": WINDOW,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        **config,
    }
    data = Dataset.from_list(rows or texts())
    # Before the model: ZeRO-3 divides a model while it is loaded only if it is known by then.
    args = SFTConfig(**values)
    model, tokenizer = make_model(folder, extended, attention, **(shape or {}))
    tokenizer.chat_template = chat_template
    # Loading may or may not draw random numbers, and an adapter is made next.
    torch.manual_seed(0)
    return SFTTrainer(
        model,
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer,
        data_collator=share
        or PoSECollator(
            tokenizer, collate=collate, **{"target_length": TARGET, "train_length": WINDOW, **(pose or {})}
        ),
        peft_config=peft,
    )


class Record:
    """What reaches the decoder: in training steps, documents with their positions; in evaluation, positions."""

    def __init__(self, model: Any) -> None:
        self.steps: list[list[Document]] = []
        self.masked: set[bool] = set()
        self.evaluation: list[list[list[int]]] = []
        decoder = next(module for module in model.modules() if type(module).__name__ == "LlamaModel")
        decoder.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: Any, args: Any, kwargs: Any) -> None:
        import torch

        positions, mask = kwargs["position_ids"], kwargs.get("attention_mask")
        if is_save_probe(kwargs["input_ids"]):
            return
        if not module.training:
            self.evaluation.append(positions.tolist())
        elif torch.is_grad_enabled():  # the self-test runs without gradients
            self.masked.add(mask is not None)
            self.steps.append(documents_of(kwargs["input_ids"], positions, mask))


def run(trainer: Any, resume: str | None = None, save: bool = True) -> dict[str, Any]:
    """Trains, and returns what can be looked at afterwards."""
    from transformers import masking_utils

    from pose_plugin.attention import restart_rule

    record = Record(trainer.model)
    collator = trainer.data_collator
    trainer.train(resume_from_checkpoint=resume)
    if save:
        trainer.save_model()
    history = trainer.state.log_history
    # The last look at the model is not an evaluation.
    evaluation = list(record.evaluation)
    return {
        "steps": record.steps,
        "masked": record.masked,
        "evaluation": evaluation,
        "losses": [line["loss"] for line in history if "loss" in line],
        "eval_losses": [line["eval_loss"] for line in history if "eval_loss" in line],
        "trained": collator.trained(),
        "rule_left": masking_utils.find_packed_sequence_indices is restart_rule,
        "logits": logits_far_out(trainer.accelerator.unwrap_model(trainer.model)),
    }
