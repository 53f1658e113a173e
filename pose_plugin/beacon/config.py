"""BeaconConfig: the settings of an Activation Beacon adapter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from peft import PeftConfig

from pose_plugin.beacon.layout import MASKS, STEPWISE, Scheme
from pose_plugin.beacon.ratios import ADAPT, CANDIDATES, RANDOM, TRAINING_POLICIES, BeaconWindow, check_ratio
from pose_plugin.beacon.register import peft_type
from pose_plugin.utils.errors import PoSEError, regular_expression

LAYOUTS = ("v1", "v2")
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_EMBEDDINGS = {"embed_tokens", "wte", "lm_head", "embed_in", "embed_out"}


@dataclass
class BeaconConfig(PeftConfig):
    """Configuration of Activation Beacon (arXiv 2401.03462).

    Args:
        interval: l, tokens that are condensed together.
        window: L, positions that may be used. None uses the model's limit: max_position_embeddings, the sliding window,
            or the length after which a RoPE changes its frequencies, whichever is smallest.
        layout: "v1" appends the beacons to their interval, so inputs within one interval give the base's logits bit for
            bit. "v2" puts one after every α tokens under a plain causal mask, which FlashAttention can run.
        mask: what a v1 beacon sees: "stepwise", "segmentation" or "full".
        attend_previous: whether v1 beacons see the memory.
        overlap: t, last tokens of each condensed interval that the next interval also sees uncondensed, so that its
            first tokens have raw tokens before them. They take t positions of the window from the memory. The published
            v1 code does something similar with a stride below its interval.
        sinks: first tokens of a text that stay in memory uncondensed. Pretrained models put much of their attention on
            them (StreamingLLM, arXiv 2309.17453), and read badly without them.
        ratio: outside training: "adapt" (the smallest ratio that fits) or a number.
        train_ratio: in training: "random" (drawn per interval), "instance" (drawn per text), "adapt", or a number.
        ratios: candidates of "adapt" and of the draws. Each divides the interval.
        headroom: tokens that "adapt" reserves for generation.
        rank: 0 copies each projection; r > 0 adds a delta of rank r to the base's projection for beacon rows.
        target_modules: projections that beacons get a copy or delta of: by default q, k, v and o. Keys and values must
            be among them; MLP projections may be.
        exclude_modules: projections to leave out.
        gradient_intervals: with n, memory older than n intervals is read without gradient. What newer beacons have read
            of it still gets one. None: all memory is read with gradient.
        dtype: type of the beacon parameters, e.g. "float32"; None uses the base's.
        seed: seed of the training ratios.

    Raises:
        PoSEError: a value that cannot work.
    """

    interval: int = 1024
    window: int | None = None
    layout: str = "v1"
    mask: str = STEPWISE
    attend_previous: bool = True
    overlap: int = 0
    sinks: int = 0
    ratio: int | str = ADAPT
    train_ratio: int | str = RANDOM
    ratios: list[int] = field(default_factory=lambda: list(CANDIDATES))
    headroom: int = 1024
    rank: int = 0
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    gradient_intervals: int | None = None
    dtype: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = peft_type()
        self.task_type = self.task_type or "CAUSAL_LM"
        self.target_modules = _names("target_modules", self.target_modules)
        self.exclude_modules = _names("exclude_modules", self.exclude_modules)
        self._check_numbers()
        self._check_ratios()
        self._check_choices()

    def _check_numbers(self) -> None:
        least = {"interval": 2, "overlap": 0, "sinks": 0, "headroom": 0, "rank": 0, "seed": 0}
        if self.window is not None:
            least["window"] = self.interval + self.overlap + self.sinks + 1
        if self.gradient_intervals is not None:
            least["gradient_intervals"] = 1
        for key, smallest in least.items():
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise PoSEError(f"{key}: {value!r} must be a whole number ≥ {smallest}")
        for key in ("overlap", "sinks"):
            if getattr(self, key) > self.interval:
                raise PoSEError(f"{key}: {getattr(self, key)} is more than the interval of {self.interval} tokens")

    def _check_ratios(self) -> None:
        if isinstance(self.ratios, str) or not isinstance(self.ratios, Iterable):
            raise PoSEError(f"ratios: {self.ratios!r} must be a list of numbers, e.g. [2, 4, 8]")
        given = list(self.ratios)
        if given == list(CANDIDATES):  # the default, without what does not divide a small interval
            given = [ratio for ratio in given if self.interval % ratio == 0]
        if not given:
            raise PoSEError(f"ratios: {self.ratios} has none that divides the interval of {self.interval} tokens")
        self.ratios = sorted({check_ratio(ratio, self.interval, "ratios") for ratio in given})
        for key, names in (("ratio", (ADAPT,)), ("train_ratio", TRAINING_POLICIES)):
            if isinstance(value := getattr(self, key), str):
                _one_of(key, value, names, " or a number")
            else:
                setattr(self, key, check_ratio(value, self.interval, key))

    def _check_choices(self) -> None:
        _one_of("task_type", self.task_type, ("CAUSAL_LM",))
        _one_of("attend_previous", self.attend_previous, (True, False))
        _one_of("layout", self.layout, LAYOUTS)
        _one_of("mask", self.mask, MASKS)
        if self.layout == "v2" and (self.mask != STEPWISE or not self.attend_previous):
            raise PoSEError(
                f"mask: {self.mask!r}, attend_previous: {self.attend_previous} have no effect in layout v2, whose mask "
                "is plain causal; leave them out or use layout v1"
            )
        if (dtype := self.torch_dtype()) is not None:
            self.dtype = str(dtype).removeprefix("torch.")  # what JSON can hold
        if self.target_modules == "all-linear":
            raise PoSEError(
                "target_modules: 'all-linear' is not supported; name the projections, e.g. [q_proj, k_proj, v_proj]"
            )
        # The model checks what a regular expression matches.
        names = set() if isinstance(self.target_modules, str) else set(self.target_modules or ())
        if named := sorted(names & _EMBEDDINGS):
            raise PoSEError(
                f"target_modules: {named} would save the whole base embedding with the adapter; leave it out, the "
                "beacon's own embedding is always trained"
            )

    def torch_dtype(self) -> Any:
        """Return the torch dtype of `dtype`; None for that of the base.

        Raises:
            PoSEError: no floating-point dtype has this name.
        """
        import torch

        if self.dtype is None:
            return None
        found = getattr(torch, str(self.dtype).removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise PoSEError(f"dtype: {self.dtype!r} is not a floating-point dtype; use float32, bfloat16 or None")
        return found

    @property
    def interleaved(self) -> bool:
        return self.layout == "v2"

    @property
    def scheme(self) -> Scheme:
        """Where beacons are and what they see."""
        return Scheme(self.interval, self.mask, self.interleaved, self.attend_previous, self.overlap, self.sinks)

    def sizes(self, window: int) -> BeaconWindow:
        """Return the window arithmetic for a resolved window size."""
        return BeaconWindow(window, self.interval, self.interleaved, self.overlap, self.sinks)


def _names(key: str, value: Any) -> Any:
    """Return what PEFT takes: names in a set, which it matches exactly, a regular expression, or None."""
    if value is None:
        return None
    if isinstance(value, str):
        regular_expression(key, value)
        return value
    if not isinstance(value, list | tuple | set) or not all(isinstance(each, str) for each in value):
        raise PoSEError(f"{key}: {value!r} must be a list of names, e.g. [q_proj, k_proj, v_proj]")
    return set(value)


def _one_of(key: str, value: object, names: tuple[Any, ...], also: str = "") -> None:
    if value not in names:
        raise PoSEError(f"{key}: {value!r} is not known; choose {', '.join(map(repr, names))}{also}")
