"""Ask a running OpenAI-compatible server whether it applies a folder's RoPE scaling.

The server, the folder's model as configured and that model without its scaling continue the same prompts. Static
scaling changes short texts too, so short prompts are enough. A weak model continues badly and alike in all; a server
that ignores the scaling continues as the model without it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pose_plugin.doctor.folder import Folder
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.findings import Finding

# Tokens that are continued per prompt, and the prompts' lengths: short ones cost nothing and already tell.
ANSWER = 16
LENGTHS = (64, 128, 256)
# Tokens per English word, about, and the depths of the needles.
TOKENS_A_WORD = 1.3
DEPTHS = (0.1, 0.5, 0.9)
_FILLER = [
    "The",
    "grass",
    "is",
    "green.",
    "The",
    "sky",
    "is",
    "blue.",
    "The",
    "sun",
    "is",
    "yellow.",
    "Here",
    "we",
    "go.",
]
# Nats per token. Engines' arithmetic differs by some thousandths; a scaling that is ignored by a tenth and more.
_CLEAR = 0.02


@dataclass(frozen=True)
class Continued:
    """What the server wrote after a prompt.

    Attributes:
        prompt: token ids by the folder's tokenizer.
        text: the continuation.
        logprobs: the server's log-probability of each of its tokens; None if it returns none.
    """

    prompt: list[int]
    text: str
    logprobs: list[float] | None


@dataclass(frozen=True)
class Compared:
    """One continuation, and how likely the local model finds it.

    Attributes:
        length: of the prompt, tokens.
        server: mean log-probability of the continuation by the server; None without logprobs.
        scaled: the same by the model as configured.
        plain: the same by the model without its scaling.
    """

    length: int
    server: float | None
    scaled: float
    plain: float


@dataclass(frozen=True)
class Needle:
    """One question for a hidden number.

    Attributes:
        words: of the text.
        depth: where the number was, 0 at the beginning.
        tokens: of the prompt, as the server counts; None if it refused the length or does not count.
        found: whether the answer holds the number.
        refused: the server's reason, if it refused.
    """

    words: int
    depth: float
    tokens: int | None
    found: bool
    refused: str = ""


class Server:
    """An OpenAI-compatible server.

    Args:
        url: up to and with /v1.
        model: its name there; default: the only one.
        key: the API key, if it wants one.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        try:
            import openai
        except ImportError:
            raise PoSEError("doctor --url needs the package openai; pip install openai") from None
        self.errors = (openai.OpenAIError,)
        self.refusals = (openai.BadRequestError,)
        self.client = openai.OpenAI(base_url=url, api_key=key or "none", timeout=600, max_retries=2)
        self.url = url
        self.model, self.window = self._model(model)

    def _model(self, wanted: str | None) -> tuple[str, int | None]:
        """Return the model's name, and the window that the server states, if it does."""
        try:
            models = self.client.models.list().data
        except self.errors as error:
            raise PoSEError(f"--url {self.url}: the server does not answer to GET /models ({error})") from None
        names = [model.id for model in models]
        if wanted is None and len(names) != 1:
            raise PoSEError(f"--url {self.url} serves {', '.join(names) or 'nothing'}; choose one with --model")
        found = next((model for model in models if wanted in (None, model.id)), None)
        if found is None:
            raise PoSEError(f"--model {wanted}: the server has {', '.join(names)}")
        extra = found.model_extra or {}
        # vLLM and SGLang state max_model_len, llama.cpp meta.n_ctx.
        stated = extra.get("max_model_len") or (extra.get("meta") or {}).get("n_ctx")
        return found.id, int(stated) if stated else None

    def find(self, words: int, depth: float, seed: int) -> Needle:
        """Ask for a number that is hidden in filler text.

        Args:
            words: of the text, about 1.3 tokens each.
            depth: of the number, 0 at the beginning.
            seed: of the number.

        Raises:
            PoSEError: the server refuses for another reason than the length.
        """
        key = str(random.Random(seed).randint(10000, 99999))
        filler = (_FILLER * (words // len(_FILLER) + 1))[:words]
        place = round(depth * len(filler))
        text = " ".join([*filler[:place], f"The pass key is {key}. Remember it.", *filler[place:]])
        question = f"{text}\nWhat is the pass key? The pass key is"
        try:
            answer = self.client.completions.create(model=self.model, prompt=question, max_tokens=8, temperature=0)
        except self.refusals as error:
            return Needle(words, depth, None, False, str(error))
        except self.errors as error:
            raise PoSEError(f"--url {self.url}: POST /completions failed for {words} words ({error})") from None
        tokens = answer.usage.prompt_tokens if answer.usage else None
        return Needle(words, depth, tokens, key in answer.choices[0].text)

    def continued(self, prompt: list[int], text: str) -> Continued:
        """Continue a text greedily.

        Raises:
            PoSEError: the server refuses the request.
        """
        try:
            answer = self.client.completions.create(
                model=self.model, prompt=text, max_tokens=ANSWER, temperature=0, logprobs=1
            )
        except self.errors as error:
            raise PoSEError(f"--url {self.url}: POST /completions failed for {len(prompt)} tokens ({error})") from None
        choice = answer.choices[0]
        scores = choice.logprobs.token_logprobs if choice.logprobs else None
        return Continued(prompt, choice.text, [x for x in scores if x is not None] if scores else None)


def compare(server: Server, folder: Folder, text: str, lengths: tuple[int, ...] = LENGTHS) -> list[Compared]:
    """Compare the server's continuations with the folder's model, scaled and not.

    Args:
        server: serves the folder's model.
        folder: has the weights.
        text: ordinary text, at least as long as the longest length.
        lengths: of the prompts, tokens.

    Raises:
        PoSEError: the text is too short, or the server refuses.
    """
    from transformers import AutoTokenizer

    from pose_plugin.checkpoints.load import load_extended

    tokenizer = AutoTokenizer.from_pretrained(folder.path)
    ids = tokenizer(text)["input_ids"]
    if len(ids) < max(lengths):
        raise PoSEError(f"the text has {len(ids)} tokens, and {max(lengths)} are needed; give a longer one with --text")
    answers = []
    for length in lengths:
        prompt = ids[:length]
        answers.append(server.continued(prompt, str(tokenizer.decode(prompt, skip_special_tokens=True))))
    model = load_extended(folder.path)
    scaled = [_score(model, tokenizer, answer) for answer in answers]
    _unscale(model)
    plain = [_score(model, tokenizer, answer) for answer in answers]
    return [
        Compared(len(a.prompt), fmean(a.logprobs) if a.logprobs else None, s, p)
        for a, s, p in zip(answers, scaled, plain, strict=True)
    ]


def _score(model: Any, tokenizer: Any, answer: Continued) -> float:
    """Return the mean log-probability of a continuation, nats per token."""
    import torch

    rest = tokenizer(answer.text, add_special_tokens=False)["input_ids"]
    if not rest:
        return 0.0
    ids = torch.tensor([[*answer.prompt, *rest]])
    with torch.inference_mode():
        logits = model(input_ids=ids.to(model.device)).logits[0, len(answer.prompt) - 1 : -1].float()
    scores = logits.log_softmax(-1)[range(len(rest)), rest]
    return float(scores.mean())


def _unscale(model: Any) -> None:
    """Give every rotary module the plain frequencies of its base, as a reader that ignores the scaling has.

    Raises:
        PoSEError: the model has one rope per layer type.
    """
    for module in model.modules():
        if not hasattr(module, "inv_freq") or not hasattr(module, "config"):
            continue
        config = copy.deepcopy(module.config)
        theta = config.rope_parameters.get("rope_theta")
        if theta is None:
            raise PoSEError(
                f"model type {config.model_type!r} has one rope per layer type, and --like compares one; leave --like "
                "out, and the needles show up to which length the server answers"
            )
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        plain = type(module)(config)
        module.rope_type, module.attention_scaling = "default", plain.attention_scaling
        module.inv_freq.copy_(plain.inv_freq)
        module.original_inv_freq.copy_(plain.inv_freq)


def judge(server: Server, folder: Folder, found: list[Compared]) -> list[Finding]:
    """Say what the comparison shows."""
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
    difference = fmean(abs(each.scaled - each.plain) for each in found)
    if difference < _CLEAR:
        findings.append(
            Finding(
                "rope",
                f"{difference:.3f} nats",
                "the model's own continuations hardly change without its scaling, so prompts this short cannot tell",
                f"Give longer prompts with --lengths, past the old window of {folder.original or 'the base'}",
                "info",
            )
        )
        return findings
    # Without the server's own numbers: a greedy continuation is likeliest by the model that wrote it.
    gaps = [
        (abs(each.server - each.scaled), abs(each.server - each.plain))
        if each.server is not None
        else (-each.scaled, -each.plain)
        for each in found
    ]
    with_scaling, without = fmean(gap[0] for gap in gaps), fmean(gap[1] for gap in gaps)
    shown = f"distance {with_scaling:.3f} with the scaling, {without:.3f} without"
    if without < with_scaling:
        findings.append(
            Finding(
                "rope",
                shown,
                "the server continues as the model does without its RoPE scaling, so it ignores the scaling",
                "Look at the engine's lines in `pose-plugin export`, or convert the folder again",
                "error",
            )
        )
    else:
        findings.append(
            Finding(
                "rope", shown, "the server applies the scaling; if answers are wrong, the model is weak", "", "info"
            )
        )
    return findings


def needles(server: Server, lengths: Sequence[int]) -> Iterator[Needle]:
    """Hide a number in texts of about these lengths (tokens), at each depth, and yield the answers."""
    for length in lengths:
        for number, depth in enumerate(DEPTHS):
            yield server.find(round(length / TOKENS_A_WORD), depth, seed=length + number)
