"""BeaconConfig: what an Activation Beacon adapter is trained and read with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft import PeftConfig

from pose_plugin.beacon.layout import MASKS, STEPWISE
from pose_plugin.beacon.ratios import ADAPT, CANDIDATES, RANDOM, TRAINING_POLICIES, Window, check_ratio
from pose_plugin.beacon.register import peft_type
from pose_plugin.utils.errors import PoSEError

LAYOUTS = ("v1", "v2")
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_EMBEDDINGS = ("embed_tokens", "wte", "lm_head", "embed_in", "embed_out")


@dataclass
class BeaconConfig(PeftConfig):
    """Configuration of Activation Beacon (arXiv 2401.03462).

    Args:
        interval: l, tokens that are condensed together.
        window: L, positions that may be used; None takes what the model knows (max_position_embeddings, the sliding
            window, or the limit after which a RoPE changes its frequencies, whichever is least).
        layout: "v1" appends the beacons to their interval: inputs up to one interval stay bit-identical to the base.
            "v2" puts one behind every α tokens under a plain causal mask, which FlashAttention can run.
        mask: what a v1 beacon sees: "stepwise", "segmentation" or "full".
        attend_previous: whether v1 beacons see the memory.
        ratio: outside training: "adapt" (the smallest that is enough) or a number.
        train_ratio: in training: "random" (drawn for each interval), "instance" (drawn once a sample), "adapt", or a
            number.
        ratios: candidates of "adapt" and of the draws. Each divides the interval.
        headroom: tokens that "adapt" leaves for what is generated.
        rank: 0 copies each projection; r > 0 adds a delta of rank r to the base's projection on beacon rows.
        target_modules: projections that beacons get of their own: all of q, k, v, o by default. Keys and values must be
            among them. MLP projections may be.
        exclude_modules: names that are left out.
        gradient_intervals: with n, memory older than n intervals is read without gradient; None lets gradients flow
            through the whole stream.
        dtype: of the beacon parameters, e.g. "float32"; None takes the base's.
        seed: of the training ratios.

    Raises:
        PoSEError: a value that cannot work.
    """

    interval: int = field(default=1024, metadata={"help": "Tokens that are condensed together."})
    window: int | None = field(default=None, metadata={"help": "Positions that may be used; None: the model's."})
    layout: str = field(default="v1", metadata={"help": "v1 (appended beacons) or v2 (interleaved)."})
    mask: str = field(default=STEPWISE, metadata={"help": "stepwise, segmentation or full."})
    attend_previous: bool = field(default=True, metadata={"help": "Whether beacons see the memory."})
    ratio: int | str = field(default=ADAPT, metadata={"help": "adapt, or a number."})
    train_ratio: int | str = field(default=RANDOM, metadata={"help": "random, instance, adapt, or a number."})
    ratios: list[int] = field(default_factory=lambda: list(CANDIDATES), metadata={"help": "Candidate ratios."})
    headroom: int = field(default=1024, metadata={"help": "Tokens that adapt leaves for what is generated."})
    rank: int = field(default=0, metadata={"help": "0: full copies; r: low-rank deltas."})
    target_modules: list[str] | str | None = field(default=None, metadata={"help": "Projections of the beacons."})
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "Names left out."})
    gradient_intervals: int | None = field(default=None, metadata={"help": "Gradient reaches back so many intervals."})
    dtype: str | None = field(default=None, metadata={"help": "dtype of the beacon parameters; None: the base's."})
    seed: int = field(default=0, metadata={"help": "Seed of the training ratios."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = peft_type()
        self.task_type = self.task_type or "CAUSAL_LM"
        for key in ("target_modules", "exclude_modules"):
            names = getattr(self, key)
            if not isinstance(names, str | list | tuple | set | None):
                raise PoSEError(f"{key}: {names!r} is no list of names; write e.g. [q_proj, k_proj, v_proj, o_proj]")
        if isinstance(self.target_modules, list | tuple):
            self.target_modules = set(self.target_modules)  # type: ignore[assignment]
        if isinstance(self.exclude_modules, list | tuple):
            self.exclude_modules = set(self.exclude_modules)  # type: ignore[assignment]
        self._check()

    def _check(self) -> None:
        _one_of("layout", self.layout, LAYOUTS)
        _one_of("mask", self.mask, MASKS)
        _whole("interval", self.interval, 2)
        _whole("headroom", self.headroom, 0)
        _whole("rank", self.rank, 0)
        _whole("seed", self.seed, 0)
        if self.window is not None:
            _whole("window", self.window, self.interval + 1)
        if self.gradient_intervals is not None:
            _whole("gradient_intervals", self.gradient_intervals, 1)
        given = self.ratios
        if not isinstance(given, list | tuple | set):
            raise PoSEError(f"ratios: {given!r} must be a list of numbers, e.g. [2, 4, 8]")
        if given == list(CANDIDATES):  # the default, shortened to what a small interval can be divided by
            self.ratios = [ratio for ratio in given if self.interval % ratio == 0]
        if not self.ratios:
            raise PoSEError(
                f"ratios: none of {given} divides the interval of {self.interval} tokens; give ratios that do"
            )
        self.ratios = sorted({check_ratio(ratio, self.interval, "ratios") for ratio in self.ratios})
        for key, value, names in (
            ("ratio", self.ratio, (ADAPT,)),
            ("train_ratio", self.train_ratio, TRAINING_POLICIES),
        ):
            if isinstance(value, str):
                _one_of(key, value, names, " or a number")
            else:
                check_ratio(value, self.interval, key)
        if self.layout == "v2" and (self.mask != STEPWISE or not self.attend_previous):
            raise PoSEError(
                f"mask: {self.mask!r}, attend_previous: {self.attend_previous} have no effect in layout v2, whose mask "
                "is plain causal; leave them out or use layout v1"
            )
        if self.dtype is not None:
            self.torch_dtype()
        if not isinstance(self.target_modules, str):
            targets = set(self.target_modules or DEFAULT_TARGETS)
            if named := sorted(targets & set(_EMBEDDINGS)):
                raise PoSEError(
                    f"target_modules: {named} would save the whole base embedding with the adapter; leave it out, the "
                    "beacon's own embedding is always trained"
                )
        elif self.target_modules == "all-linear":
            raise PoSEError(
                "target_modules: 'all-linear' is not for Beacon; name the projections, e.g. [q_proj, k_proj, v_proj]"
            )

    def torch_dtype(self) -> Any:
        """The torch dtype of `dtype`; None where the base's is taken.

        Raises:
            PoSEError: no floating-point dtype has this name.
        """
        import torch

        if self.dtype is None:
            return None
        found = getattr(torch, str(self.dtype).removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise PoSEError(f"dtype: {self.dtype!r} is no floating-point dtype; use float32, bfloat16 or None")
        return found

    @property
    def interleaved(self) -> bool:
        return self.layout == "v2"

    def sizes(self, window: int) -> Window:
        """The window arithmetic for a resolved window size."""
        return Window(window, self.interval, self.interleaved)


def _one_of(key: str, value: object, names: tuple[str, ...], also: str = "") -> None:
    if value not in names:
        raise PoSEError(f"{key}: {value!r} is not known; choose {', '.join(map(repr, names))}{also}")


def _whole(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PoSEError(f"{key}: {value!r} must be a whole number ≥ {least}")
