"""Find out which rope a server computes, from what it writes after short prompts.

The folder's model scores each continuation on this machine, once per rope that a server may compute: as configured,
without its scaling, and as each inference engine reads the folder. Static scaling changes short texts too, so prompts
inside the old window are enough. A weak model writes badly under every rope, but one rope still explains it best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from pose_plugin.checkpoints.saved import Saved
from pose_plugin.doctor.engines import same_rope
from pose_plugin.doctor.folder import Folder
from pose_plugin.doctor.server import Answer, Server
from pose_plugin.export.engines import RULES, taken
from pose_plugin.rope.kinds import Frequencies, inverse_frequencies
from pose_plugin.utils.errors import PoSEError, shown
from pose_plugin.utils.findings import Finding
from pose_plugin.utils.server import RefusedError

# Tokens that are continued per prompt, and the prompts' lengths.
ANSWER = 16
LENGTHS = (64, 128, 256)
CONFIGURED = "as configured"
# Nats per token. Engines' arithmetic differs by some thousandths, a scaling that is ignored by a tenth and more.
_CLEAR = 0.02
# A server with the folder's weights is nearer than this to one of the ropes, quantised to four bits or not.
_FAR = 0.5


@dataclass(frozen=True)
class Compared:
    """Which rope explains a server's continuations.

    Attributes:
        distances: nats per token by rope, `CONFIGURED` first. With the server's log-probabilities: the mean distance
            to the local ones. Without: how much likelier the local model's own choices are.
        logprobs: whether the server returned log-probabilities.
    """

    distances: dict[str, float]
    logprobs: bool

    @property
    def nearest(self) -> str:
        return min(self.distances, key=lambda name: self.distances[name])

    @property
    def verdict(self) -> str:
        """ "applied", "other" for another rope, "unclear", or "none" if no rope explains the answers."""
        mine, spread = self.distances[CONFIGURED], max(self.distances.values()) - min(self.distances.values())
        if self.distances[self.nearest] > _FAR:
            return "none"
        if spread < _CLEAR:
            return "unclear"
        return "applied" if mine - self.distances[self.nearest] < _CLEAR else "other"


def default_lengths(window: int | None) -> list[int]:
    """Return lengths of prompts that leave room for the answer and a chat template in a server's window."""
    return [length for length in LENGTHS if window is None or length <= 0.75 * window] or [(window or 0) // 2]


def compare(server: Server, folder: Folder, text: str, lengths: Sequence[int] = LENGTHS) -> Compared:
    """Compare the server's continuations with the folder's model under each rope.

    Args:
        server: serves the folder's model.
        folder: has the weights.
        text: ordinary text, at least as long as the longest length.
        lengths: of the prompts, tokens.

    Raises:
        PoSEError: the text is too short, the server refuses, the folder does not load, or its model has one rope per
            layer type.
    """
    from transformers import AutoTokenizer

    from pose_plugin.checkpoints.load import load_extended

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder.path)
        model = load_extended(folder.path)
    except Exception as error:  # any type: a torn file raises the safetensors library's own
        raise PoSEError(
            f"--like {folder.path}: its model or its tokenizer does not load: {shown(error, 300).rstrip('.')}. "
            f"`pose-plugin doctor {folder.path}` looks for the cause"
        ) from error
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) < max(lengths):
        raise PoSEError(f"--compare {max(lengths)}: the text for it has {len(ids)} tokens; give shorter lengths")
    modules = _rotary_modules(model)
    ropes = _ropes(folder, modules[0])
    rows = []
    for length in lengths:
        prompt = str(tokenizer.decode(ids[:length], skip_special_tokens=True))
        try:
            answer = server.ask(prompt, ANSWER)
        except RefusedError as error:
            raise PoSEError(f"--compare {length}: {error}; give shorter lengths") from None
        rows.append((*_tokens(tokenizer, prompt, answer.text, server.uses_chat), answer))
    distances = {}
    for name, rope in ropes.items():
        for module in modules:
            _set_rope(module, *rope)
        found = [_distance(model, *row) for row in rows if row[1]]
        distances[name] = fmean(found) if found else 0.0
    return Compared(distances, all(answer.logprobs for _, rest, answer in rows if rest))


def _tokens(tokenizer: Any, prompt: str, answer: str, chat: bool) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt as the server reads it, and those of its answer."""
    if chat:
        messages = [{"role": "user", "content": prompt}]
        start = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return list(start), tokenizer(answer, add_special_tokens=False)["input_ids"]
    # Tokenized as one text: alone, some tokenizers put a mark before the answer's first word.
    start, both = tokenizer(prompt, verbose=False)["input_ids"], tokenizer(prompt + answer, verbose=False)["input_ids"]
    same = next((i for i, (a, b) in enumerate(zip(start, both, strict=False)) if a != b), len(start))
    return both[:same], both[same:]


def _distance(model: Any, prompt: list[int], rest: list[int], answer: Answer) -> float:
    """Return how far a continuation is from what the model would have written, nats per token."""
    import torch

    ids = torch.tensor([[*prompt, *rest]], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    mine = logits[range(len(rest)), rest]
    if not answer.logprobs:
        # Greedy answers: 0 under the rope that chose them.
        return float((logits.max(-1).values - mine).mean())
    if len(answer.logprobs) == len(rest):
        return float((mine - torch.tensor(answer.logprobs, device=mine.device)).abs().mean())
    # Cut into other tokens, for example within a word; their sum is that of the same text.
    return abs(float(mine.sum()) - math.fsum(answer.logprobs)) / len(rest)


def _rotary_modules(model: Any) -> list[Any]:
    """Return the modules that hold the decoder's frequencies.

    Raises:
        PoSEError: the model has none, or one rope per layer type.
    """
    found = [
        module for name, module in model.named_modules() if hasattr(module, "inv_freq") and "vision" not in name.lower()
    ]
    if not found or len({module.inv_freq.shape for module in found}) > 1:
        raise PoSEError(
            f"--like compares one rope, but model type {model.config.model_type!r} has one per layer type; leave "
            "--like out: the hidden numbers still show up to which length the server answers"
        )
    return found


def _ropes(folder: Folder, module: Any) -> dict[str, tuple[Frequencies, float]]:
    """Return the frequencies and the scale of cos and sin that a server may compute, by name, each once."""
    dim = 2 * module.inv_freq.shape[-1]
    saved = Saved(folder.path)
    theta = float(saved.rope["rope_theta"])
    own = (module.inv_freq.double().cpu().numpy(), float(getattr(module, "attention_scaling", 1.0)))
    ropes = {CONFIGURED: own}
    wanted = {
        "without its scaling": {"rope_type": "default", "rope_theta": theta},
        "without its scaling and its rope_theta": {"rope_type": "default", "rope_theta": 10000.0},
    }
    found = [(name, inverse_frequencies(rope, dim)) for name, rope in wanted.items()]
    for rule in RULES:
        # Some engines stop at the folder.
        with suppress(PoSEError, KeyError, TypeError, ValueError):
            found.append((f"as {rule.engine} {rule.versions}", taken(rule, saved).frequencies(dim, saved.maximum)))
    for name, each in found:
        if not any(same_rope(known, each) for known in ropes.values()):
            ropes[name] = each
    return ropes


def _set_rope(module: Any, frequencies: Frequencies, scale: float) -> None:
    """Give a rotary module fixed frequencies, for texts of every length."""
    import torch

    module.rope_type, module.attention_scaling = "default", scale
    module.inv_freq.copy_(torch.from_numpy(np.asarray(frequencies)))
    if hasattr(module, "original_inv_freq"):
        module.original_inv_freq.copy_(module.inv_freq)


def judge(server: Server, folder: Folder, compared: Compared) -> list[Finding]:
    """Return what the server's window and the comparison show."""
    findings = []
    if server.window and folder.maximum and server.window < folder.maximum:
        findings.append(
            Finding(
                "max_model_len",
                server.window,
                f"the server's window is smaller than the folder's, {folder.maximum}",
                "Start it with the folder's window (vLLM: --max-model-len, llama.cpp: --ctx-size)",
            )
        )
    mine, nearest = compared.distances[CONFIGURED], compared.nearest
    by = "log-probabilities" if compared.logprobs else "words (it returns no log-probabilities)"
    measured = f"{mine:.3f} nats"
    other = f"{compared.distances[nearest]:.3f} {nearest}"
    scaled = folder.kind != "default"
    if compared.verdict == "unclear":
        happens = f"every rope explains the server's {by}, so prompts this short cannot tell"
        fix = f"Give longer prompts with --compare, past the old window of {folder.before or 'the base'}"
        return [*findings, Finding("rope", measured, happens, fix, "info")]
    if compared.verdict == "none":
        happens = f"no rope explains the server's {by} (nearest: {other}): it serves other weights, or samples"
        return [*findings, Finding("rope", measured, happens, "Compare with the folder that it serves")]
    if compared.verdict == "applied":
        away = min(value for name, value in compared.distances.items() if name != CONFIGURED)
        applies = "applies the scaling" if scaled else "computes the folder's rope, which has no scaling"
        happens = f"the server {applies}, by its {by}; the next rope is {away:.3f} away"
        return [*findings, Finding("rope", measured, happens, "", "info")]
    ignored = scaled and nearest.startswith("without its scaling")
    happens = f"the server {'ignores the scaling' if ignored else 'computes another rope'}, by its {by}: {other}"
    fix = "Look at the engine's lines in `pose-plugin export`, or convert the folder again"
    return [*findings, Finding("rope", measured, happens, fix, "error")]
