"""The tuner's forward: reads a text of any length, interval by interval, with the unmodified Hugging Face model.

- `Reading.forward` checks the call, chooses the ratios, and turns what was read into an output with a loss.
- `Reader` (reader.py) runs the passes.
- Labels are shifted once over the whole text, and the loss is the model's own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from pose_plugin.beacon import checks, ratios
from pose_plugin.beacon.cache import BeaconCache, kept_on_error, stream_of
from pose_plugin.beacon.config import BeaconConfig
from pose_plugin.beacon.layer import BeaconEmbedding, BeaconLinear
from pose_plugin.beacon.losses import IGNORED, CountedOutput, shift_labels, stream_loss, token_figures
from pose_plugin.beacon.ratios import EMPTY, fits, intervals
from pose_plugin.beacon.reader import Outcome, Reader
from pose_plugin.utils.errors import PoSEError


@dataclass
class Call:
    """The arguments of one forward; see `Reading.forward`. Those with a default are taken from its kwargs."""

    text: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    cache: Any
    labels: torch.Tensor | None
    use_cache: bool | None
    settings: dict[str, Any]
    shift_labels: torch.Tensor | None = None
    logits_to_keep: int | torch.Tensor = 0
    ratio: Any = None
    ratios: Any = None
    headroom: int | None = None
    num_items_in_batch: Any = None
    fused_lm_head: bool = False
    return_dict: bool | None = None

    def __post_init__(self) -> None:
        self.shifted_here = self.shift_labels is None and self.labels is not None
        if self.shifted_here:
            self.shift_labels = shift_labels(self.labels)  # type: ignore[arg-type]

    def labels_from(self, start: int) -> int:
        """Return how many tokens from `start` on have a label; all of them if the caller computes the loss."""
        if self.shift_labels is None:
            return int(self.text.shape[0] * (self.text.shape[1] - start))
        return int((self.shift_labels[:, start:] != IGNORED).sum())

    def without_padding(self) -> torch.Tensor:
        """Return the text without its last columns that only pad, if their outputs are for a loss that ignores them.

        As intervals they would cost as much as text, and a text within one interval would seem to be condensed.
        """
        end = int(self.attention_mask.sum(-1).max())  # type: ignore[union-attr]
        if self.shift_labels is None or bool((self.shift_labels[:, end:] != IGNORED).any()):
            return self.text
        return self.text[:, :end]


class Reading:
    """The forward of BeaconModel, which provides the attributes below."""

    model: Any
    router: Any
    training: bool
    condensed_since_step: int
    # Labels behind the first beacon of their text, which the beacons get a gradient from.
    labels_behind_beacons: int
    # For trainers that log accuracy and entropy from sums: adds num_correct_tokens, entropy_sum, num_valid_tokens to
    # the outputs of calls with labels (TRL up to 1.15 with loss_type="chunked_nll").
    report_statistics: bool = False
    _step: tuple[int, int]
    _ratio_override: ratios.Ratio | None
    _base_forward: Any
    _decoder_layers: list[Any]

    if TYPE_CHECKING:

        @property
        def disabled(self) -> bool: ...
        @property
        def attention(self) -> str: ...
        @property
        def cache_key(self) -> str: ...
        @property
        def rotary(self) -> Any: ...
        @property
        def window(self) -> ratios.BeaconWindow: ...
        @property
        def active_config(self) -> BeaconConfig: ...
        @property
        def embedding(self) -> BeaconEmbedding: ...
        @property
        def active_adapters(self) -> list[str]: ...
        @property
        def probe(self) -> Any: ...

    def set_step(self, step: int) -> None:
        """Set the step that training ratios are drawn for; each forward within it draws another sample.

        Call it with the trainer's global step before each step. All ranks then draw the same, and a resumed run draws
        what the first run would have drawn. Without it, ratios are drawn by the number of forwards.
        """
        self._step = (int(step), 0)
        self.condensed_since_step = self.labels_behind_beacons = 0

    def _generator(self) -> Any:
        step, sample = self._step
        self._step = (step, sample + 1)
        return ratios.generator(self.active_config.seed, step, sample)

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def plan(
        self, cache: BeaconCache, tokens: int, ratio: Any = None, headroom: int | None = None, carries: bool = True
    ) -> list[int] | None:
        """Return the ratios of a call that reads `tokens` more tokens; see `ratios.plan` for rules and errors.

        Args:
            ratio: a policy for this call; None uses that of `condensing(…)`, or the configuration.
            headroom: tokens still to come after them; if a cache begins, at least the configured headroom.
            carries: whether the caller continues the cache. Otherwise nothing follows, and a text that is read raw
                needs no headroom.

        Returns:
            The ratios. None if "adapt" reads all raw: outside training, while the text and what is still to come fit
            the window.
        """
        config, policy = self.active_config, self._policy(ratio)
        # A stream that has begun uses up the headroom that was reserved for it.
        free = max(headroom or 0, config.headroom if carries and not cache.tokens else 0)
        adaptive = isinstance(policy, str) and policy == ratios.ADAPT and not self._trains
        if adaptive and cache.can_stay_raw and self.window.holds_raw(cache.tokens + tokens + free):
            return None
        state, tokens = self._start(cache, tokens)
        # Without a cache, a text that grows is read again each time, and what is still to come gets less.
        if headroom is None or (carries and state == EMPTY):
            headroom = max(config.headroom, headroom or 0)
        return ratios.plan(
            self.window,
            policy,
            tokens,
            state,
            config.ratios,
            headroom=headroom,
            rng=self._generator if self._trains else None,
        )

    def _policy(self, ratio: Any) -> Any:
        policy = ratio if ratio is not None else self._ratio_override
        if policy is not None:
            return policy
        return self.active_config.train_ratio if self._trains else self.active_config.ratio

    def _start(self, cache: BeaconCache, tokens: int) -> tuple[ratios.StreamState, int]:
        """Return where condensing begins, and how many tokens it reads: a raw text is read again."""
        if cache.must_read_again(self.active_config.scheme):
            return EMPTY, cache.tokens + tokens
        return cache.state, tokens

    def check_room(self, cache: BeaconCache, tokens: int, ratio: Any, room: int) -> None:
        """Require that a text and what is generated after it fit the window, before anything is read.

        Args:
            room: tokens that may be generated; the others as for `plan`.

        Raises:
            PoSEError: they do not fit, and what was generated until then would be lost.
        """
        first = self.plan(cache, tokens, ratio, headroom=room)
        if first is None or room < 2:  # the last token is never read
            return
        later, window = self._policy(ratio), self.window
        read = room - 1
        if isinstance(later, list):
            later = later[-1]
        elif later == ratios.ADAPT:
            # It takes smaller ones only while these leave room for all new tokens, the last one included.
            later, read = max(self.active_config.ratios), room
        state, tokens = self._start(cache, tokens)
        condensed, last = intervals(tokens + read, window.interval, state.pending)
        whole = first + [later] * (condensed + window.interleaved - len(first))
        if not fits(window, whole, last, state.memory):
            raise PoSEError(
                f"max_new_tokens: {room} tokens do not fit window {window.size} after {tokens} tokens and "
                f"{state.memory} beacons at ratio {later}. Give a larger ratio, fewer new tokens, or ratio='adapt', "
                "which chooses by length"
            )

    def check_length(self, tokens: int, trains: bool) -> None:
        """Require that a text of this length can be read whole, as a trainer reads it.

        Raises:
            PoSEError: the step that reads it would stop the run.
        """
        config = self.active_config
        policy = self._ratio_override or (config.train_ratio if trains else config.ratio)
        if trains or policy != ratios.ADAPT or not self.window.holds_raw(tokens):
            rng = functools.partial(ratios.generator, config.seed, 0, 0)
            ratios.plan(self.window, policy, tokens, EMPTY, config.ratios, headroom=config.headroom, rng=rng)

    # Each interval has its own layout, so tracing this loop would make a graph for each. Layers that were compiled by
    # themselves still run compiled.
    @torch.compiler.disable
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Read (batch, tokens) of any length, in intervals, behind `past_key_values`.

        Args:
            input_ids: (batch, tokens); all rows have the same layout.
            attention_mask: (batch, tokens); padding on the right only, and only if no cache continues.
            position_ids: ignored if they number the tokens, otherwise refused.
            past_key_values: a BeaconCache to continue, in place; `cache` from transformers 5.24 on.
            inputs_embeds: (batch, tokens, hidden) instead of ids.
            labels: (batch, tokens), −100 for no loss; shifted once over the whole input.
            use_cache: whether to return the cache; None: outside training.
            kwargs: `context` (a BeaconCache to read behind, which is not changed); `logits_to_keep` (how many of the
                last logits to return, 0 for all); `ratio` ("adapt" or a fixed ratio for this call); `ratios` (one per
                interval that this call condenses); `headroom` (tokens still to come, for "adapt");
                `num_items_in_batch`; `shift_labels`; `fused_lm_head` (with labels: per-token figures instead of
                logits, for TRL 1.16); and settings for the model.

        Returns:
            CausalLMOutputWithPast: loss, logits (batch, kept tokens, vocabulary), the BeaconCache. TokenOutput if
            `fused_lm_head` is true.

        Raises:
            PoSEError: the text does not fit the window, or cannot be condensed correctly (see `checks`). The cache is
                then as it was before.
        """
        cache = self._given_cache(past_key_values, kwargs.pop("cache", None), kwargs.pop("context", None))
        if self.disabled:
            own = ("ratio", "ratios", "headroom")
            settings = {key: value for key, value in kwargs.items() if key not in own}
            return self._call(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                labels=labels,
                use_cache=use_cache,
                **{self.cache_key: cache},
                **settings,
            )
        text = checks.check_input(input_ids, inputs_embeds, self.embedding.sentinel)
        options = {each.name: kwargs.pop(each.name) for each in fields(Call) if each.name in kwargs}
        call = Call(text, attention_mask, position_ids, cache, labels, use_cache, kwargs, **options)
        with kept_on_error(cache):
            return self._read(call)

    def _given_cache(self, past_key_values: Any, cache: Any, context: Any) -> Any:
        """Return the cache to continue: given by either of transformers' names, or a copy of the context."""
        if cache is not None and self.cache_key != "cache":
            raise checks.renamed()
        found = past_key_values if cache is None else cache
        if context is None:
            return found
        if found is not None:
            raise checks.two_caches()
        return stream_of(context).copy()

    @property
    def _call(self) -> Any:
        return self._base_forward if self._base_forward is not None else self.model

    def _read(self, call: Call) -> Any:
        checks.check_attention(self.attention, self.active_config)
        if self._trains:
            checks.check_checkpointing(self._decoder_layers)
            checks.check_unpacked(self.probe, "gradients")
        rows, tokens = call.text.shape[:2]
        stream = self._continue(call.cache, rows)
        carries = call.cache is not None or call.use_cache is True
        padded = checks.check_mask(call.attention_mask, tokens, carries)
        checks.check_positions(call.position_ids, call.attention_mask, tokens, stream.tokens)
        checks.check_labels(call.shift_labels, call.text.shape[:2])
        extra = checks.check_extra(call.settings, tokens)
        text = call.without_padding() if padded else call.text
        policy = checks.one_policy(call.ratio, call.ratios)
        chosen = self.plan(stream, text.shape[1], policy, call.headroom, carries)
        # A loss needs all logits; a tensor of indices is applied to all of them afterwards.
        keep = call.logits_to_keep if isinstance(call.logits_to_keep, int) and call.shift_labels is None else 0
        reader = Reader(self, self._call, stream, extra, keep or None)
        outcome = reader.read(text, chosen)
        outcome.pad(tokens)
        if call.cache is not None and call.cache is not stream:
            call.cache.left_empty = True  # see `stream_of`
        self.condensed_since_step += outcome.condensed
        if self._trains and outcome.before_beacons is not None:
            self.labels_behind_beacons += call.labels_from(outcome.before_beacons)
        return self._output(call, outcome, None if padded else stream)

    def _output(self, call: Call, outcome: Outcome, stream: BeaconCache | None) -> Any:
        logits, shifted, items = outcome.all_logits(), call.shift_labels, call.num_items_in_batch
        zero: Any = self.touch(logits) if self._trains and not outcome.condensed else 0
        if call.fused_lm_head and shifted is not None:
            # The last token predicts nothing if the labels were shifted here.
            cut = slice(-1) if call.shifted_here else slice(None)
            figures = token_figures(logits[:, cut], shifted[:, cut], items)
            figures.loss, figures.log_probs = figures.loss + zero, figures.log_probs + zero
            return figures
        loss: Any = None
        output_cls: Any = CausalLMOutputWithPast
        counts: dict[str, Any] = {}
        if shifted is not None:
            loss = stream_loss(self.model, logits, call.labels, shifted, items) + zero
            if self.report_statistics:
                output_cls, figures = CountedOutput, token_figures(logits.detach(), shifted)
                counts = {
                    "num_correct_tokens": figures.is_top1.sum(),
                    "entropy_sum": figures.entropy.sum(),
                    "num_valid_tokens": figures.label_mask.sum(),
                }
        if not isinstance(call.logits_to_keep, int):
            logits = logits[:, call.logits_to_keep]
        elif call.logits_to_keep:
            logits = logits[:, -call.logits_to_keep :]
        output = output_cls(loss=loss, logits=logits, hidden_states=outcome.all_hidden(), **counts)
        by_default = not self.training and getattr(self.model.config, "use_cache", True)
        keeps = call.use_cache if call.use_cache is not None else (call.cache is not None or by_default)
        if keeps and stream is not None:
            output[self.cache_key] = stream
        return output.to_tuple() if call.return_dict is False else output

    def touch(self, like: torch.Tensor) -> torch.Tensor:
        """Return a zero loss that depends on every beacon parameter.

        A text within one interval reads no beacon, and DDP would wait for gradients that never come.
        """
        layers = [module for module in self.model.modules() if isinstance(module, BeaconLinear | BeaconEmbedding)]
        return sum((layer.touch(like) for layer in layers), like.new_zeros((), dtype=torch.float32))

    def _continue(self, cache: Any, batch: int) -> BeaconCache:
        """Return the stream to continue, with as many rows as the input."""
        stream = stream_of(cache)
        row = self.embedding.row().detach()[0].float()
        mark = (self.router, *self.active_adapters, self.embedding.version)
        rope = self.rotary.inv_freq.detach().float()
        checks.check_origin(stream, self.signature(), row, rope, mark)
        if stream.tokens and stream.batch_size != batch:
            if batch % stream.batch_size:
                raise PoSEError(
                    f"cache: it holds {stream.batch_size} rows, the input {batch}; give a multiple of "
                    f"{stream.batch_size} rows. Beam search leaves one row per beam in a cache that it continues in "
                    "place: pass it as context=…, which keeps it as it was"
                )
            stream.batch_repeat_interleave(batch // stream.batch_size)  # beams, or several questions on one text
        return stream

    def signature(self) -> dict[str, Any]:
        """Return what a cache must have been made with to be continued here."""
        config, text = self.active_config, self.model.config.get_text_config()
        return {
            "interval": config.interval,
            "overlap": config.overlap,
            "sinks": config.sinks,
            "layout": config.layout,
            "mask": config.mask,
            "layers": int(text.num_hidden_layers),
            "hidden_size": int(text.hidden_size),
        }
