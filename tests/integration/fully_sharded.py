"""A training loop of one's own under FSDP2, with the package's functions where docs/distributed.md says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(model: torch.nn.Module) -> None:
    """Each decoder layer, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sharded_from_meta(model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """What large models do: no rank but the first holds the weights, and all begin on the meta device.

    Returns the sharded model, and what was wrong with its frequencies before they were made anew.
    """
    from pose_plugin.rope import restore_rope, verify_rope
    from pose_plugin.utils.errors import RopeMismatchError

    weights = model.state_dict() if dist.get_rank() == 0 else {}
    model.to("meta")
    shard(model)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()  # what is really there is whatever was in memory
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    wrong = ""
    try:
        verify_rope(model)
    except RopeMismatchError as error:
        wrong = str(error)
    restore_rope(model)
    verify_rope(model)
    return model, wrong


def train(folder: Path, case: Any, fault: Any = None, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Four steps of two rows: two ranks with one row each, or one process with two in turn."""
    from pose_plugin import PoSECollator, self_test
    from tests.integration import trl_runs

    many = case.strategy != "single"
    if many:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
    model, tokenizer = trl_runs.make_model(folder)
    wrong = ""
    if case.adapter == "lora":
        from peft import get_peft_model

        from tests.integration.distributed import lora

        torch.manual_seed(0)
        model = get_peft_model(model, lora())
    if many and case.adapter == "full":
        model, wrong = sharded_from_meta(model)
    elif many:
        shard(model)
    if fault is not None and rank == 1:
        fault(model)
    collator = PoSECollator(tokenizer, target_length=trl_runs.TARGET, train_length=trl_runs.WINDOW)
    report = self_test(model, collator, rows=1)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    rows = [{"input_ids": tokenizer(row["text"])["input_ids"]} for row in trl_runs.texts()]
    losses = []
    model.train()
    for step in range(4):
        total = torch.zeros(())
        for row in range(rank, 2, world):
            loss = model(**collator([{**rows[2 * step + row], "labels": rows[2 * step + row]["input_ids"]}])).loss
            # FSDP takes the mean over ranks.
            (loss * world / 2).backward()
            total += loss.detach() / 2
        if many:
            dist.all_reduce(total)
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return {
        "wrong": wrong,
        "losses": losses,
        "after_jump": report.after_jump,
        **after(folder, model, collator, many),
    }


def after(folder: Path, model: Any, collator: Any, many: bool) -> dict[str, Any]:
    from pose_plugin.checkpoints import complete_folder
    from tests.integration.distributed import divided, frequencies
    from tests.integration.records import logits_far_out

    weights = get_model_state_dict(model, options=WHOLE) if many else model.state_dict()
    if os.environ.get("RANK", "0") == "0":
        model.save_pretrained(folder / "out", state_dict=weights)
        complete_folder(folder / "out", model.config, collator.settings)
    found = {
        "world": dist.get_world_size() if many else 1,
        "divided": divided(model),
        "frequencies": frequencies(model),
        "logits": logits_far_out(model),
    }
    if many:
        dist.barrier()
        dist.destroy_process_group()
    return found
