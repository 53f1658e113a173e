"""What runs of any framework record: documents that reached the model, logits far out, and ratios that beacons drew."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.forked import LIMIT

Document = tuple[tuple[int, ...], tuple[int, ...]]


def spans(tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray | None) -> Iterator[tuple[int, int, int]]:
    """Yield (row, begin, end) of every document: one per row if there is a mask, else cut where positions restart.

    Args:
        tokens, positions, mask: shape (batch, length).
    """
    for row in range(len(tokens)):
        if mask is not None:
            used = np.flatnonzero(mask[row])
            yield row, int(used[0]), int(used[-1]) + 1
            continue
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(positions[row]) < 1) + 1).tolist(), len(tokens[row])]):
            # Padding looks like a document; w0 pads and is in no text.
            if tokens[row, begin:end].any():
                yield row, begin, end


def documents_of(tokens: Any, positions: Any, mask: Any = None) -> list[Document]:
    """Return (tokens, positions) of every document of a batch, given as tensors or arrays."""
    tokens, positions, mask = (None if each is None else np.asarray(each) for each in (tokens, positions, mask))
    return [
        (tuple(tokens[row, begin:end].tolist()), tuple(positions[row, begin:end].tolist()))
        for row, begin, end in spans(tokens, positions, mask)
    ]


# An input whose positions reach past the base's window of 64 to the end of the target.
PROBE = ([[33, 41, 49, 57, 65, 73, 81, 89]], [[0, 1, 2, 60, 200, 201, 400, 511]])


def logits_far_out(model: Any) -> list[list[float]]:
    """Return the logits of the probe, (tokens, vocabulary)."""
    import torch

    was = model.training
    model.eval()
    ids, places = map(torch.tensor, PROBE)
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=places, attention_mask=torch.ones_like(ids), use_cache=False)
    model.train(was)
    return out.logits[0].float().tolist()


RELOAD = """
import json, os, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pose_plugin", "axolotl"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
base, (tokens, positions), *folders = json.loads(sys.argv[1])
ids, places, answers = torch.tensor(tokens), torch.tensor(positions), []
for folder in folders:
    adapter, config = os.path.exists(folder + "/adapter_config.json"), AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(base if adapter else folder, config=config, dtype=torch.float32)
    if adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        out = model.eval()(input_ids=ids, position_ids=places, attention_mask=torch.ones_like(ids))
    answers.append((out.logits[0].tolist(), AutoTokenizer.from_pretrained(folder).model_max_length))
print("RESULT" + json.dumps(answers))
"""


def reloaded_without_us(base: Path, folders: list[Path]) -> list[tuple[list[list[float]], int]]:
    """Return (logits of the probe, the tokenizer's limit) of saved folders, in a process that has neither this package
    nor Axolotl."""
    request = json.dumps([str(base), PROBE, *map(str, folders)])
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, request],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=base,
        # Otherwise torch would ask for the plugin itself.
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULT")[1])


def watch_draws(tuner: Any) -> list[tuple[int, list[int]]]:
    """Return a list that fills with (tokens, ratios) of every training forward of a Beacon model."""
    import torch

    plan, drawn = tuner.plan, []

    def watched(cache: Any, tokens: int, *args: Any, **kwargs: Any) -> list[int]:
        found = plan(cache, tokens, *args, **kwargs)
        if tuner.training and torch.is_grad_enabled():
            drawn.append((tokens, found))
        return found

    tuner.plan = watched
    return drawn


def weights_of(model: Any) -> dict[str, Any]:
    """Return a copy of all weights by name."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def moved(model: Any, before: dict[str, Any]) -> list[str]:
    """Return the names of the weights in `before` that have changed since."""
    import torch

    now = dict(model.named_parameters())
    return [name for name, weight in before.items() if not torch.equal(weight, now[name])]


def layer_kinds(model: Any) -> list[str]:
    """Return the kinds of the layers below a Beacon model's projections, e.g. ["Linear4bit"]."""
    wrapped = [module for module in model.modules() if type(module).__name__ == "BeaconLinear"]
    return sorted({type(module.get_base_layer()).__name__ for module in wrapped})


def unbind_all() -> None:
    """Undo the class-level bindings of objects that earlier tests of this process may still hold."""
    from pose_plugin.training import binding

    gc.unfreeze()
    gc.collect()
    for place, entry in binding._wrapped.items():
        setattr(*place, entry.original)
    binding._wrapped.clear()
