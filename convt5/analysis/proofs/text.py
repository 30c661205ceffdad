"""Proofs of a text model: what its outputs read, and that decoding equals teacher forcing."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from convt5 import errors
from convt5.analysis import costs
from convt5.analysis.proofs.results import ROUNDING, Proof, Stage, first_failing
from convt5.modeling.description import StackName
from convt5.modeling.mixers.base import Reach
from convt5.modeling.model import ConvT5
from convt5.ops import shift_right

NUM_SEGMENTS = 3
LEAST_ROWS = 2 * NUM_SEGMENTS
LEAST_IDS = 3

_PASSES = 12


class Inputs(NamedTuple):
    """Rows of a text model; the program shifts the targets itself."""

    encoder_tokens: Int[np.ndarray, "batch source"]
    encoder_ids: Int[np.ndarray, "batch source"]
    encoder_positions: Int[np.ndarray, "batch source"]
    targets: Int[np.ndarray, "batch target"]
    decoder_ids: Int[np.ndarray, "batch target"]
    decoder_positions: Int[np.ndarray, "batch target"]


class Outputs(NamedTuple):
    """Outputs of a text model for these inputs."""

    encoded: Float[Array, "batch positions embed"]
    logits: Float[Array, "batch target vocab"]


class Kept(NamedTuple):
    """Masks of the outputs that must not change."""

    encoder: Bool[np.ndarray, "batch positions"]
    decoder: Bool[np.ndarray, "batch target"]


@dataclasses.dataclass(frozen=True)
class _Claim:
    """A change of inputs, and the outputs that it must not affect.

    Attributes:
        name: the property that this proves.
        base, changed: the inputs before and after.
        kept: the outputs that must not change.
        others_change: whether some other output must change, to show that the inputs matter.
    """

    name: str
    base: Inputs
    changed: Inputs
    kept: Kept
    others_change: bool = True


class TextProofs:
    """The proofs of one text model.

    Each property is proven by a change of inputs: the same compiled program runs on both, and the
    outputs that the property covers must be exactly equal.
    """

    def __init__(self, model: ConvT5, source: int, target: int, random: np.random.Generator):
        """Prepares rows.

        Args:
            model: a model in float64.
            source, target: tokens per row.
            random: generator of the inputs and of their changes.

        Raises:
            UserError: rows are too short for several examples, or there are no two tokens to
                exchange.
        """
        if model.config.vocab_size < LEAST_IDS:
            raise errors.UserError(
                f"prove: vocab_size={model.config.vocab_size} must be at least {LEAST_IDS}: every "
                "proof puts another token in the place of one, and neither is padding (0); inspect "
                "the model without --prove, or with more ids."
            )
        self.model = model
        self.lengths: dict[StackName, int] = {"encoder": source, "decoder": target}
        self.random = random
        config = model.config
        positions = config.encoder_positions(source)
        sizes: list[tuple[StackName, int, int]] = [
            ("encoder", positions, config.stem_stride),
            ("decoder", target, 1),
        ]
        errors.raise_all(
            (
                f"--{stack}_length={self.lengths[stack]} gives rows of {size} positions, too few "
                f"for {NUM_SEGMENTS} packed examples and padding; give at least "
                f"{(NUM_SEGMENTS + 1) * stride}."
                for stack, size, stride in sizes
                if size <= NUM_SEGMENTS
            ),
            where="prove",
        )
        self.cuts = _cuts(target)
        self.rows = len(self.cuts)
        self.plain = self._plain()

    @property
    def flops(self) -> float:
        """FLOPs of all proofs if all hold: about a dozen passes over the rows."""
        source, target = self.lengths.values()
        cost = costs.model_cost(self.model.config, encoder_length=source, decoder_length=target)
        return _PASSES * self.rows * cost.forward_flops

    def all(self) -> list[Proof]:
        """Returns the proof of every property."""
        return [
            self.later_targets(),
            self.other_segments(),
            self.padding(),
            self.neighbours(),
            self.decoding(),
            self.reach("encoder"),
            self.reach("decoder"),
        ]

    def later_targets(self) -> Proof:
        """Proves that logits at position t, which predict target t, read only earlier targets."""
        index = np.arange(self.lengths["decoder"])
        before = index[None] < self.cuts[:, None]
        targets = np.where(before, self.plain.targets, self._others(self.plain.targets))
        return self._proven(
            _Claim(
                "no output depends on its own target or a later one",
                self.plain,
                self.plain._replace(targets=targets),
                Kept(self._all_positions(), index[None] <= self.cuts[:, None]),
            )
        )

    def other_segments(self) -> Proof:
        """Proves that examples are independent: changes or removes another one in each row."""
        name = "no packed example depends on another"
        base = self._packed()
        row = np.arange(self.rows)[:, None]
        chosen, removed = 1 + row % NUM_SEGMENTS, row // NUM_SEGMENTS % 2 == 1
        encoder, decoder = base.encoder_ids == chosen, base.decoder_ids == chosen
        tokens = np.where(encoder, self._others(base.encoder_tokens), base.encoder_tokens)
        targets = np.where(decoder, self._others(base.targets), base.targets)
        changed = base._replace(
            encoder_tokens=tokens,
            encoder_ids=np.where(encoder & removed, 0, base.encoder_ids),
            targets=targets,
            decoder_ids=np.where(decoder & removed, 0, base.decoder_ids),
        )
        ids = self._of_windows(base.encoder_ids)
        kept = Kept(
            (ids != chosen) & (ids != 0), (base.decoder_ids != chosen) & (base.decoder_ids != 0)
        )
        try:
            return self._proven(_Claim(name, base, changed, kept))
        except errors.UserError as refusal:
            return Proof(name=name, worst=None, note=f"packed rows are refused: {refusal}")

    def padding(self) -> Proof:
        base = self.plain
        source, target = base.encoder_ids != 0, base.decoder_ids != 0
        changed = base._replace(
            encoder_tokens=np.where(source, base.encoder_tokens, self._tokens(source.shape)),
            targets=np.where(target, base.targets, self._tokens(target.shape)),
        )
        kept = Kept(self._of_windows(base.encoder_ids) != 0, target)
        name = "nothing depends on the content of padding"
        return self._proven(_Claim(name, base, changed, kept, others_change=False))

    def neighbours(self) -> Proof:
        base = self.plain
        even = np.arange(self.rows)[:, None] % 2 == 0
        full = np.where(even, base.encoder_ids, 1)
        changed = base._replace(
            encoder_tokens=np.where(even, base.encoder_tokens, self._others(base.encoder_tokens)),
            encoder_ids=full,
            targets=np.where(even, base.targets, self._others(base.targets)),
        )
        kept = Kept(self._all_positions() & even, np.ones_like(base.targets, bool) & even)
        name = "nothing depends on other rows of the batch"
        return self._proven(_Claim(name, base, changed, kept))

    def decoding(self) -> Proof:
        """Compares logits of step-by-step decoding with those of teacher forcing."""
        base = self.plain

        def worst(model: ConvT5) -> float:
            at_once = self._outputs(model, base)
            stepped = _decode_stepwise(model, at_once.encoded, base)
            apart = jnp.where(
                base.decoder_ids[..., None] != 0, jnp.abs(stepped - at_once.logits), 0.0
            )
            return float(jnp.max(apart) / jnp.max(jnp.abs(at_once.logits)))

        return self._judged("step-by-step decoding equals teacher forcing", worst, ROUNDING)

    def reach(self, stack: StackName) -> Proof:
        """Proves the receptive field: changes all inputs outside the field of one position per row.

        Checked after the highest layer with a bounded field, which includes the layers below. For
        the decoder, only the field to the left is checked; later targets are a separate property.
        """
        name = f"the {stack} reads no further than its receptive field"
        stages = self._reach_stages(stack)
        top = max((i for i, stage in enumerate(stages) if _bounds(stage[2], stack)), default=None)
        if top is None:
            return Proof(name=name, worst=None, note="every layer may read the whole row")
        label, cut, reach = stages[top]
        claim = self._beyond(name, stack, reach)
        if claim is None:
            note = f"{reach} is more than rows of {self.lengths[stack]} tokens hold"
            return Proof(name=name, worst=None, note=note)
        worst, _, _ = self._violation(cut(), claim)
        if worst == 0:
            less = Reach(*(None if side is None else max(0, side - 1) for side in reach))
            inner = self._beyond(name, stack, less)
            is_whole = inner is not None and self._violation(cut(), inner)[0] > 0
            note = f"{reach}, {'read' if is_whole else 'not read'} to its ends"
            return Proof(name=name, worst=worst, note=note)

        def fails(index: int) -> bool:
            _, cut, reach = stages[index]
            claim = self._beyond(name, stack, reach)
            return claim is not None and self._violation(cut(), claim)[0] > 0

        label, _, reach = stages[first_failing(top + 1, fails)]
        note = f"stated {reach}"
        return Proof(name=name, worst=worst, layer=label, note=note)

    def _reach_stages(self, stack: StackName) -> list[tuple[str, Callable[[], ConvT5], Reach]]:
        """Returns the model truncated after each layer of a stack, and its reach."""
        source, target = self.lengths.values()
        cost = costs.model_cost(self.model.config, encoder_length=source, decoder_length=target)
        reaches = [layer.reach for layer in cost.layers if layer.stack == stack]
        stages = [stage for stage in _stages(self.model) if stage[0].startswith(f"{stack} layer")]
        cuts = [cut for _, cut in stages[:-1]]
        # The whole model is compiled already.
        cuts.append(lambda: self.model)
        return [(label, cut, r) for (label, _), cut, r in zip(stages, cuts, reaches, strict=True)]

    def _beyond(self, name: str, stack: StackName, reach: Reach) -> _Claim | None:
        """Returns a change of all inputs outside the field; None if rows are not longer."""
        base = self.plain
        ids = base.encoder_ids if stack == "encoder" else base.decoder_ids
        stride = self.model.config.stem_stride if stack == "encoder" else 1
        ends = np.maximum.reduce(np.where(ids != 0, np.arange(ids.shape[1]), 0), axis=1)
        place = (np.linspace(0, 1, self.rows) * ends).astype(int)[:, None] // stride
        index = np.arange(ids.shape[1])[None]
        # The decoder's input at a position is the target before it.
        first = place * stride - (stack == "decoder")
        outside = np.zeros_like(ids, bool)
        if reach.left is not None:
            outside |= index < first - reach.left
        if reach.right is not None and stack == "encoder":
            outside |= index > first + reach.right
        outside &= ids != 0
        if not outside.any():
            return None
        nothing = Kept(~self._all_positions(), np.zeros_like(base.decoder_ids, bool))
        if stack == "encoder":
            tokens = np.where(outside, self._others(base.encoder_tokens), base.encoder_tokens)
            kept = nothing._replace(encoder=np.arange(nothing.encoder.shape[1]) == place)
            return _Claim(name, base, base._replace(encoder_tokens=tokens), kept)
        targets = np.where(outside, self._others(base.targets), base.targets)
        kept = nothing._replace(decoder=index == place)
        return _Claim(name, base, base._replace(targets=targets), kept)

    def _outputs(self, model: ConvT5, inputs: Inputs) -> Outputs:
        """Returns the outputs; those of the whole model on plain rows are computed only once."""
        if model is self.model and inputs is self.plain:
            return self._plain_outputs
        return _forward(model, inputs)

    @functools.cached_property
    def _plain_outputs(self) -> Outputs:
        return _forward(self.model, self.plain)

    def _violation(self, model: ConvT5, claim: _Claim) -> tuple[float, bool, bool]:
        before, after = (self._outputs(model, inputs) for inputs in (claim.base, claim.changed))
        return _violation(before, after, claim)

    def _proven(self, claim: _Claim) -> Proof:
        def worst(model: ConvT5) -> float:
            return self._violation(model, claim)[0]

        changed, elsewhere, finite = self._violation(self.model, claim)
        if not finite:
            note = "outputs are not finite, so nothing can be proved"
            return Proof(name=claim.name, worst=math.nan, note=note)
        if claim.others_change and not elsewhere:
            note = "no output changed at all, so nothing is proved"
            return Proof(name=claim.name, worst=math.nan, note=note)
        return self._judged(claim.name, worst, known=changed)

    def _judged(
        self,
        name: str,
        worst: Callable[[ConvT5], float],
        allowed: float = 0.0,
        known: float | None = None,
    ) -> Proof:
        """Returns the proof, and finds the layer at which it fails.

        Args:
            name: the property.
            worst: returns the largest violation of a model.
            allowed: the tolerance.
            known: the violation of the whole model, if computed already.
        """
        violation = worst(self.model) if known is None else known
        proof = Proof(name=name, worst=violation, allowed=allowed)
        if proof.result == "holds":
            return proof
        stages = _stages(self.model)
        first = first_failing(len(stages), lambda i: not worst(stages[i][1]()) <= allowed)
        return dataclasses.replace(proof, layer=stages[first][0])

    def _plain(self) -> Inputs:
        """Rows with one example each: sources of several lengths, and two short targets."""
        rows, (source, target) = self.rows, self.lengths.values()
        sources = self.random.integers(-(-source // 2), source + 1, (rows, 1))
        ends = np.full((rows, 1), target)
        ends[:2] = -(-target // 2)
        self.cuts = np.minimum(self.cuts, ends[:, 0] - 1)
        encoder_ids = (np.arange(source) < sources).astype(np.int32)
        decoder_ids = (np.arange(target) < ends).astype(np.int32)
        return self._inputs(encoder_ids, decoder_ids)

    def _packed(self) -> Inputs:
        """Rows with three examples each and padding, with different boundaries in each row."""
        source, target = self.lengths.values()
        stride = self.model.config.stem_stride
        windows = self.model.config.encoder_positions(source)
        encoder_ids = np.repeat(self._segments(windows), stride, axis=1)[:, :source]
        return self._inputs(encoder_ids, self._segments(target))

    def _segments(self, length: int) -> Int[np.ndarray, "batch length"]:
        ids = np.zeros((self.rows, length), np.int32)
        for row in ids:
            ends = np.sort(self.random.permutation(np.arange(1, length))[:NUM_SEGMENTS])
            for segment, (start, end) in enumerate(zip([0, *ends], ends, strict=False), start=1):
                row[start:end] = segment
        return ids

    def _inputs(self, encoder_ids: np.ndarray, decoder_ids: np.ndarray) -> Inputs:
        return Inputs(
            np.where(encoder_ids != 0, self._tokens(encoder_ids.shape), 0),
            encoder_ids,
            _positions(encoder_ids),
            np.where(decoder_ids != 0, self._tokens(decoder_ids.shape), 0),
            decoder_ids,
            _positions(decoder_ids),
        )

    def _tokens(self, shape: Sequence[int]) -> np.ndarray:
        """Returns random ids other than padding."""
        return self.random.integers(1, self.model.config.vocab_size, shape).astype(np.int32)

    def _others(self, tokens: np.ndarray) -> np.ndarray:
        """Returns a different id for each, never padding."""
        count = self.model.config.vocab_size - 1
        away = self.random.integers(1, max(count, 2), tokens.shape)
        return (1 + (tokens - 1 + away) % count).astype(np.int32)

    def _of_windows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the segment of each encoder position."""
        return ids[:, :: self.model.config.stem_stride]

    def _all_positions(self) -> np.ndarray:
        return np.ones_like(self._of_windows(self.plain.encoder_ids), bool)


@jax.jit
def _forward(model: ConvT5, inputs: Inputs) -> Outputs:
    encoded = model.encode(
        inputs.encoder_tokens, segment_ids=inputs.encoder_ids, positions=inputs.encoder_positions
    )
    logits = model.decode(
        encoded,
        shift_right(jnp.asarray(inputs.targets), jnp.asarray(inputs.decoder_ids)),
        encoder_segment_ids=inputs.encoder_ids,
        segment_ids=inputs.decoder_ids,
        positions=inputs.decoder_positions,
    )
    return Outputs(encoded, logits)


@jax.jit
def _decode_stepwise(
    model: ConvT5, encoded: Float[Array, "batch positions embed"], inputs: Inputs
) -> Float[Array, "batch target vocab"]:
    """Returns the logits of step-by-step decoding, fed with the targets."""
    tokens = shift_right(jnp.asarray(inputs.targets))
    state = model.init_decoding(
        encoded, encoder_segment_ids=inputs.encoder_ids, length=tokens.shape[1]
    )

    def step(state, token):
        logits, state = model.decode_step(state, token)
        return state, logits

    return jnp.swapaxes(jax.lax.scan(step, state, tokens.T)[1], 0, 1)


def _violation(before: Outputs, after: Outputs, claim: _Claim) -> tuple[float, bool, bool]:
    """Returns the largest change of a kept output, whether others change, and finiteness."""
    changes = [_change(a, b) for a, b in zip(before, after, strict=True)]
    kept = [np.where(k, np.asarray(c), 0.0) for k, c in zip(claim.kept, changes, strict=True)]
    worst = max(float(x.max(initial=0.0)) for x in kept)
    elsewhere = any(
        bool((np.asarray(c)[~k] > 0).any()) for k, c in zip(claim.kept, changes, strict=True)
    )
    return worst, elsewhere, all(bool(jnp.isfinite(x).all()) for x in before)


@jax.jit
def _change(
    before: Float[Array, "batch length channels"], after: Float[Array, "batch length channels"]
) -> Float[Array, "batch length"]:
    """Returns the change at each position, relative to the largest value of all rows."""
    apart = jnp.abs(after - before)
    apart = jnp.where(jnp.isnan(apart), jnp.inf, apart)
    return jnp.max(apart, axis=-1, initial=0.0) / jnp.max(jnp.abs(before), initial=1e-300)


def _stages(model: ConvT5) -> list[Stage]:
    """Returns the model truncated after each of its layers, bottom first, with names."""
    config = model.config
    below = "the embeddings" if config.stem is None else "the embeddings or the stem"

    def cut(encoder: int, decoder: int) -> ConvT5:
        other = copy.copy(model)
        other.encoder = model.encoder.lowest(encoder)
        other.decoder = model.decoder.lowest(decoder)
        return other

    layers = len(config.encoder_layers)
    return [
        (below, functools.partial(cut, 0, 0)),
        *(
            (_layer_name("encoder", i, mixing.kind), functools.partial(cut, i + 1, 0))
            for i, mixing in enumerate(config.encoder_layers)
        ),
        *(
            (_layer_name("decoder", i, mixing.kind), functools.partial(cut, layers, i + 1))
            for i, mixing in enumerate(config.decoder_layers)
        ),
    ]


def _layer_name(stack: StackName, index: int, kind: str) -> str:
    return f"{stack} layer {index} ({kind})"


def _cuts(length: int) -> np.ndarray:
    """Returns positions to split rows at: borders of blocks of powers of two, and the end."""
    borders = [2**i for i in range((length - 1).bit_length())]
    spread = np.linspace(1, length - 1, max(2, LEAST_ROWS - len(borders))).astype(int)
    return np.array([*borders, *spread])


def _bounds(reach: Reach, stack: StackName) -> bool:
    """Returns whether the field of a layer is bounded on the side that `reach` checks."""
    return reach.left is not None or (stack == "encoder" and reach.right is not None)


def _positions(ids: Int[np.ndarray, "batch length"]) -> Int[np.ndarray, "batch length"]:
    """Returns positions counted from the start of each example."""
    index = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    begins = np.diff(ids, axis=1, prepend=0) != 0
    starts = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    return np.where(ids != 0, index - starts, 0).astype(np.int32)
