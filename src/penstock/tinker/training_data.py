"""The SDK's training data and results: protobuf to a learner's input, and back.

A request is checked completely before anything is computed. It either fails with a reason or runs.
"""

# The SDK's protobuf module has only the types of its base class.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from torch import Tensor

from penstock.errors import UserError
from penstock.tinker.schema import pb
from penstock.train.interface import Datum, Outputs
from penstock.train.losses import Limits, LossSpec

Array = npt.NDArray[Any]

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
CLIP_LOW, CLIP_HIGH, RATIO_MASK = "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"
_NUMPY = {pb.DTYPE_FLOAT32: np.dtype(np.float32), pb.DTYPE_INT64: np.dtype(np.int64)}
_OF_A_POLICY = frozenset({LOGPROBS, ADVANTAGES})
_BOUNDS = frozenset({CLIP_LOW, CLIP_HIGH})


@dataclass(frozen=True, slots=True)
class _Loss:
    """One of the SDK's losses.

    Attributes:
        part: key of `penstock.train.losses.LOSSES`.
        required: inputs that each datum must have in addition to the targets.
        optional: inputs that a datum may have; `weights` is always allowed.
        config: keys of `loss_fn_config` and their defaults.
    """

    part: str
    required: frozenset[str] = _OF_A_POLICY
    optional: frozenset[str] = frozenset()
    config: Mapping[str, float] = field(default_factory=dict[str, float])


_CLIP = {CLIP_LOW: 0.8, CLIP_HIGH: 1.2}
LOSSES: Mapping[str, _Loss] = {
    "cross_entropy": _Loss("cross_entropy", frozenset()),
    "importance_sampling": _Loss("importance_sampling"),
    "ppo": _Loss("ppo", optional=_BOUNDS, config=_CLIP),
    "cispo": _Loss("cispo_token", optional=_BOUNDS, config=_CLIP),
    "dro": _Loss("dro", config={"beta": 0.05}),
    "gspo": _Loss("gspo_token", _OF_A_POLICY | {RATIO_MASK}, _BOUNDS, _CLIP),
}
"""Losses by the SDK's name. For `forward_backward_custom`, the client computes the loss and sends `cross_entropy`."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits of the base model: `vocabulary`, and `tokens` of one datum."""

    vocabulary: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A `forward_backward` request in the learner's form.

    Attributes:
        forward_only: compute no gradient.
        loss: loss to evaluate.
        data: the data. From sparse tensors, each datum has only the listed targets.
        cells: for each datum, the shape of its targets and the cell of each target (None: all, in order).
    """

    forward_only: bool
    loss: LossSpec
    data: Sequence[Datum]
    cells: Sequence[tuple[tuple[int, ...], Array | None]]

    def parts(self, tokens: int) -> Iterator[Batch]:
        """Split the batch, in order. Each part has at most `tokens` tokens, but at least one datum."""
        first, filled = 0, 0
        for index, datum in enumerate(self.data):
            length = len(datum.input_ids)
            if index > first and filled + length > tokens:
                yield replace(self, data=self.data[first:index], cells=self.cells[first:index])
                first, filled = index, 0
            filled += length
        yield replace(self, data=self.data[first:], cells=self.cells[first:])


def joined(found: Sequence[Outputs]) -> Outputs:
    """Join the outputs of a batch's parts. Only the sums of losses are kept."""
    losses = {part: sum(outputs.losses.get(part, 0.0) for outputs in found) for part in found[0].losses}
    return Outputs([row for outputs in found for row in outputs.logprobs], losses, {}, {})


def decode(body: bytes, sizes: Sizes) -> Batch:
    """Parse a `ForwardBackwardRequest`.

    Raises:
        UserError: malformed, an unknown loss, or a bad tensor. The message names the datum and a remedy.
    """
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest of the SDK: {error}") from error
    loss = LOSSES.get(request.loss_fn)
    if loss is None:
        raise UserError(
            f"loss_fn {request.loss_fn!r} is not supported here; use {', '.join(LOSSES)}, or forward_backward_custom "
            "with a Python function, which the client evaluates"
        )
    spec = LossSpec({loss.part: 1.0}, _limits(request, loss), all_logprobs=True)
    if not request.data:
        raise UserError("forward_backward has no data; give at least one Datum")
    read = [_datum(f"datum {index}", given, request.loss_fn, sizes) for index, given in enumerate(request.data)]
    names = {name for datum, _ in read for name in datum.extra}
    if lacking := [i for i, (datum, _) in enumerate(read) if set(datum.extra) != names]:
        raise UserError(f"datum {lacking[0]} lacks {', '.join(sorted(names - read[lacking[0]][0].extra.keys()))}")
    batch = Batch(request.forward_only, spec, [datum for datum, _ in read], [cells for _, cells in read])
    laid_out = sum(math.prod(shape) for shape, _ in batch.cells)  # a sparse tensor's shape counts, not its bytes
    if laid_out > MOST_LAID_OUT:
        raise UserError(f"the answer would have {laid_out} values, and {MOST_LAID_OUT} are the most; send fewer data")
    return batch


def encode(batch: Batch, outputs: Outputs) -> bytes:
    """Return a `ForwardBackwardOutput`: the loss's sum, and logprobs shaped as targets."""
    answer = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    answer.metrics["loss:sum"] = sum(outputs.losses.values())
    rows = [_laid_out(shape, at, found) for (shape, at), found in zip(batch.cells, outputs.logprobs, strict=True)]
    for trailing, group in groupby(rows, key=lambda row: row.shape[1:]):  # one record holds rows of one width
        flat = [row.tobytes() for row in group]
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(flat))
        tensor = record.fields[LOGPROBS]
        tensor.data, tensor.dtype = b"".join(flat), pb.DTYPE_FLOAT32
        tensor.offsets = np.cumsum([0, *map(len, flat)], dtype=np.int64).tobytes()
        tensor.trailing_shape.extend(trailing)
    return answer.SerializeToString()


MOST_LAID_OUT = 1 << 24
"""Maximum number of values in the answer to one request."""


def _laid_out(shape: tuple[int, ...], at: Array | None, found: Tensor) -> Array:
    values = found.numpy()
    if at is not None:
        values, listed = np.zeros(int(np.prod(shape)), np.float32), values
        values[at] = listed
    return values.reshape(shape)


def _limits(request: Any, loss: _Loss) -> Limits:
    given = {name: value.number for name, value in request.loss_fn_config_v2.items() if value.HasField("number")}
    given = dict(request.loss_fn_config) | given
    texts = [name for name, value in request.loss_fn_config_v2.items() if value.HasField("text")]
    if unknown := sorted({*given, *texts} - loss.config.keys()):
        known = ", ".join(loss.config) or "none"
        raise UserError(
            f"loss_fn_config of {request.loss_fn!r} has no {', '.join(unknown)} as a number; it has {known}"
        )
    values = {**loss.config, **given}
    if bad := [name for name, value in values.items() if not 0 <= value < np.inf]:
        raise UserError(f"loss_fn_config {bad[0]} must be a number of at least 0, got {values[bad[0]]}")
    limits = Limits(correction="none", beta=values.get("beta", 0.0))
    if CLIP_LOW in values:
        return replace(limits, low=1 - values[CLIP_LOW], high=values[CLIP_HIGH] - 1)
    return limits


def _datum(what: str, given: Any, loss_fn: str, sizes: Sizes) -> tuple[Datum, tuple[tuple[int, ...], Array | None]]:
    loss, tokens = LOSSES[loss_fn], _tokens(what, given.model_input, sizes)
    needed, known = {TARGETS} | loss.required, {TARGETS, WEIGHTS} | loss.required | loss.optional
    if missing := sorted(needed - given.loss_fn_inputs.keys()):
        raise UserError(f"{what} has no {', '.join(missing)}, which the loss {loss_fn!r} needs in loss_fn_inputs")
    if unknown := sorted(given.loss_fn_inputs.keys() - known):
        raise UserError(
            f"{what} has {', '.join(unknown)} in loss_fn_inputs; {loss_fn!r} reads {', '.join(sorted(known))}"
        )
    tensors = {name: _Tensor.read(f"{what}: {name}", tensor) for name, tensor in given.loss_fn_inputs.items()}
    shape = tensors[TARGETS].shape
    if tensors[TARGETS].values.dtype != np.int64:
        raise UserError(f"{what}: {TARGETS} is float32; give the tokens as int64")
    for name, tensor in tensors.items():
        if tensor.shape != shape or not tensor.shape or tensor.shape[0] != len(tokens):
            raise UserError(
                f"{what}: {name} has shape {list(tensor.shape)}, model_input has {len(tokens)} tokens and "
                f"{TARGETS} shape {list(shape)}; give each token its targets, and all tensors one shape"
            )
    if len(shape) > 2 or min(shape, default=1) < 1 or (len(shape) == 2 and shape[1] > sizes.vocabulary):  # noqa: PLR2004 - [T, K]
        raise UserError(f"{what}: {TARGETS} has shape {list(shape)}; give [{len(tokens)}] or [{len(tokens)}, K]")
    if len(shape) == 2 and loss_fn != "cross_entropy":  # noqa: PLR2004
        raise UserError(f"{what}: {TARGETS} has shape {list(shape)}; only cross_entropy takes several targets a token")
    at = _listed(tuple(tensors.values()))
    values = {name: tensor.values_at(at) for name, tensor in tensors.items()}
    targets = values[TARGETS].astype(np.int64)
    _check_range(f"{what}: {TARGETS}", targets, sizes.vocabulary)
    count = len(targets)
    datum = Datum(
        tokens,
        cast("Sequence[int]", targets),
        cast("Sequence[float]", values.get(WEIGHTS, np.ones(count, np.float32))),
        cast("Sequence[float]", values.get(LOGPROBS, np.zeros(count, np.float32))),
        cast("Sequence[float]", values.get(ADVANTAGES, np.zeros(count, np.float32))),
        positions=_positions(shape, at),
        extra={
            name: cast("Sequence[float]", values[name]) for name in (CLIP_LOW, CLIP_HIGH, RATIO_MASK) if name in values
        },
    )
    return datum, (shape, at)


def _positions(shape: tuple[int, ...], at: Array | None) -> Sequence[int] | None:
    """Return the row of each listed cell, or None if the cells are the tokens."""
    if len(shape) == 1 and at is None:
        return None
    cells = np.arange(int(np.prod(shape))) if at is None else at
    return cast("Sequence[int]", cells // int(np.prod(shape[1:])))


def _tokens(what: str, chunks: Any, sizes: Sizes) -> Sequence[int]:
    parts: list[Array] = []
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise UserError(
                f"{what}: model_input has a chunk of {chunk.WhichOneof('chunk')}; this service trains on text only"
            )
        parts.append(_from_bytes(f"{what}: model_input", chunk.encoded_text.tokens, np.dtype(np.int32)))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if not 0 < len(tokens) <= sizes.tokens:
        raise UserError(f"{what}: model_input has {len(tokens)} tokens; the model takes 1 to {sizes.tokens}")
    _check_range(f"{what}: model_input", tokens, sizes.vocabulary)
    return cast("Sequence[int]", tokens)


def _check_range(what: str, tokens: Array, vocabulary: int) -> None:
    outside = (tokens < 0) | (tokens >= vocabulary)
    if outside.any():
        place = int(outside.argmax())
        raise UserError(f"{what} has token {tokens[place]} at place {place}; the vocabulary is 0 to {vocabulary - 1}")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a request. For a sparse one, `cells` are the places of `values`, ascending."""

    shape: tuple[int, ...]
    values: Array
    cells: Array | None = None

    @classmethod
    def read(cls, what: str, given: Any) -> _Tensor:
        dtype = _NUMPY.get(given.dtype)
        if dtype is None:
            raise UserError(f"{what} is of a type that is not read here; give float32 or int64")
        sparse = given.WhichOneof("encoding") == "sparse_csr"
        values = _from_bytes(what, given.sparse_csr.values if sparse else given.dense, dtype)
        shape = tuple(given.shape) or (len(values),)
        if not np.isfinite(values).all():
            place = int((~np.isfinite(values)).argmax())
            raise UserError(f"{what} has {values[place]} at place {place}; give finite numbers")
        if sparse:
            return cls(shape, values, _cells(what, given.sparse_csr, shape, len(values)))
        if int(np.prod(shape)) != len(values):
            raise UserError(f"{what} has {len(values)} values for the shape {list(shape)}")
        return cls(shape, values)

    def values_at(self, at: Array | None) -> Array:
        """Return the values of cells `at` (None: all), 0 where a sparse tensor lists none."""
        if self.cells is None:
            return self.values if at is None else self.values[at]
        assert at is not None, "a sparse tensor has listed cells"  # noqa: S101
        found = np.zeros(len(at), self.values.dtype)
        found[np.searchsorted(at, self.cells)] = self.values
        return found


def _listed(tensors: Sequence[_Tensor]) -> Array | None:
    """Return the cells that are listed, or not 0 in a dense tensor; None if no tensor is sparse."""
    cells = [np.flatnonzero(t.values) if t.cells is None else t.cells for t in tensors]
    return np.unique(np.concatenate(cells)) if any(t.cells is not None for t in tensors) else None


def _cells(what: str, csr: Any, shape: tuple[int, ...], count: int) -> Array:
    index = np.dtype(np.int64)
    rows, columns = _from_bytes(what, csr.crow_indices, index), _from_bytes(what, csr.col_indices, index)
    lengths = np.diff(rows)
    fits = len(shape) == 2 and len(rows) == shape[0] + 1 and len(columns) == count  # noqa: PLR2004
    if not fits or rows[0] != 0 or rows[-1] != count or (lengths < 0).any():
        raise UserError(
            f"{what} is no CSR tensor of the shape {list(shape)}: its indices do not fit its {count} values"
        )
    cells = np.repeat(np.arange(shape[0]), lengths) * shape[1] + columns
    if count and (columns.min() < 0 or columns.max() >= shape[1] or (np.diff(cells) <= 0).any()):
        raise UserError(
            f"{what} is no CSR tensor of the shape {list(shape)}: columns must ascend in each row, within it"
        )
    return cells


def _from_bytes(what: str, data: bytes, dtype: np.dtype[Any]) -> Array:
    if len(data) % dtype.itemsize:
        raise UserError(f"{what} has {len(data)} bytes, which is no number of {dtype.name} values")
    return np.frombuffer(data, dtype).copy()  # torch takes no read-only memory
