"""A learner of several ranks as rank 0 sees it, and what the other ranks do: each call is a command to all of them."""

# torch ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from penstock.config import TrainConfig
from penstock.errors import LearnerError, PenstockError, error_from_json, error_to_json
from penstock.train.fsdp import REFUSED_ELSEWHERE, Gathering, ShardedLearner
from penstock.train.interface import AdamSpec, Datum, Learner, LoraSpec, Outputs, StepFigures
from penstock.train.learner import ServedDtype
from penstock.train.losses import LossSpec, loss_named
from penstock.train.rank_group import Message, RankGroup
from penstock.weights.manifest import TensorProvider

_LOSS = TypeAdapter(LossSpec)


class RankedLearner(Learner):
    """The learner of all ranks; lives on rank 0 and holds one shard itself.

    Calls come from any one thread at a time; `weights` may be read by another one.

    Args:
        group: of the ranks; the others run `serve`.
        model_path: see `LocalLearner`, as the rest.
        config: see `LocalLearner`.
        seed: see `LocalLearner`.
        served_dtype: see `LocalLearner`.

    Raises:
        ConfigError: see `PolicyModel`.
        LearnerError: a rank was lost; in every later call too.
    """

    def __init__(
        self, group: RankGroup, model_path: str, config: TrainConfig, *, seed: int, served_dtype: ServedDtype
    ) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._lost = ""
        values = {
            "command": "build",
            "model_path": model_path,
            "config": config.model_dump(mode="json"),
            "seed": seed,
            "served_dtype": served_dtype,
        }
        with self._together():
            group.tell(Message(values))
            self._part = _build(group, values)
            _check(group.answers())

    @property
    def versions(self) -> dict[str | None, int]:  # pyright: ignore[reportIncompatibleVariableOverride] - read only
        """See `Learner.versions`."""
        return self._part.versions

    @property
    def is_lost(self) -> bool:
        """Whether a rank is lost, or a call broke off between the ranks."""
        return bool(self._lost)

    def forward(self, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        """See `Learner.forward`."""
        return self._run("forward", adapter, loss, data)

    def forward_backward(self, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        """See `Learner.forward_backward`. Each rank takes the same number of micro-batches."""
        return self._run("forward_backward", adapter, loss, data)

    def optim_step(self, adapter: str | None, adam: AdamSpec, *, scale: float) -> StepFigures:
        """See `Learner.optim_step`."""
        answers = self._call({"command": "optim_step", "adapter": adapter, "adam": asdict(adam), "scale": scale})
        return StepFigures(**answers[0].values)

    def create_adapter(self, name: str, spec: LoraSpec) -> None:
        """See `Learner.create_adapter`. Every rank holds all of it."""
        self._call({"command": "create_adapter", "name": name, "spec": asdict(spec)})

    def drop_adapter(self, name: str) -> None:
        """See `Learner.drop_adapter`."""
        self._call({"command": "drop_adapter", "name": name})

    def set_adapter(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """See `Learner.set_adapter`."""
        self._call({"command": "set_adapter", "name": name}, tensors)

    def adapter_config(self, name: str) -> Mapping[str, Any]:
        """See `Learner.adapter_config`."""
        return self._part.adapter_config(name)

    def weights(self, adapter: str | None) -> TensorProvider:
        """See `Learner.weights`: each pass gathers a layer at a time, and the next one while a layer is being sent."""
        part = self._part
        if adapter is not None:  # every rank holds all of it
            return TensorProvider(lambda: part.weights(adapter))
        return TensorProvider(self._gather_all, specs=part.specs)

    def merged_weights(self, adapter: str) -> TensorProvider:
        """See `Learner.merged_weights`; gathered as `weights` does."""
        self._part.check_merging(adapter)
        return TensorProvider(lambda: self._gather_all(adapter), specs=self._part.specs)

    def save(self, adapter: str | None, folder: Path) -> Mapping[str, Any]:
        """See `Learner.save`; every rank writes its shard, so all must see the folder."""
        folder = folder.resolve()
        return self._call({"command": "save", "adapter": adapter, "folder": str(folder)})[0].values

    def load(self, adapter: str | None, folder: Path, values: Mapping[str, Any]) -> None:
        """See `Learner.load`; the number of ranks need not be that of `save`."""
        folder = folder.resolve()
        self._call({"command": "load", "adapter": adapter, "folder": str(folder), "values": dict(values)})

    def release_memory(self) -> None:
        """See `Learner.release_memory`; on every rank."""
        self._call({"command": "release_memory"})

    def stop(self) -> None:
        """End the other ranks, if none is lost."""
        if not self._lost:
            with self._lock, self._together():
                self._group.tell(Message({"command": "stop"}))
            self._lost = "the learner was stopped"

    def _run(self, command: str, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        values = {"command": command, "adapter": adapter, "loss": _LOSS.dump_python(loss, mode="json")}
        answers = self._call(values, pack(data))
        logprobs = torch.stack([answer.tensors["logprobs"] for answer in answers]).sum(0)  # of others' data: 0
        sums = {
            kind: _added(answer.values[kind] for answer in answers) for kind in ("losses", "denominators", "metrics")
        }
        return Outputs(logprobs.split([len(datum.target_ids) for datum in data]), **sums)

    def _call(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> list[Message]:
        """Have every rank do the same; returns what each answers."""
        message = Message(values, tensors or {})
        with self._lock, self._together():
            self._group.tell(message)
            mine = _respond(self._part, message)
            others = self._group.answers()
            if "error" not in mine.values:
                _check(others)
        if "error" in mine.values:
            errors = [answer.values["error"] for answer in (mine, *others) if "error" in answer.values]
            raise error_from_json(next((e for e in errors if e["message"] != REFUSED_ELSEWHERE), errors[0]))
        return [mine, *others]

    def _gather_all(self, merged: str | None = None) -> Iterator[tuple[str, Tensor]]:
        units = iter(range(self._part.units))
        following = [self._gather(next(units), merged)]
        while following:
            tensors = self._take(following.pop())
            begun = False
            while tensors:
                # Each is let go as it is given away, so what follows is all that is held beside it.
                yield tensors.pop(0)
                if not begun:  # now the reader has let go of the unit before
                    following += [self._gather(unit, merged) for unit in itertools.islice(units, 1)]
                    begun = True

    def _gather(self, unit: int, merged: str | None) -> Gathering:
        with self._lock, self._together():
            self._group.tell(Message({"command": "gather", "unit": unit, "merged": merged}))
            return self._part.gather(unit, merged)

    def _take(self, gathered: Gathering) -> list[tuple[str, Tensor]]:
        try:
            return gathered.take()
        except RuntimeError as error:  # not under the lock: a step may be under way, and fail alike
            self._lost = _lost_each_other(error)
            raise LearnerError(self._lost) from error

    @contextmanager
    def _together(self) -> Generator[None]:
        """For what all ranks do at once: if it breaks off, they do not stand at one place any more."""
        if self._lost:
            raise LearnerError(self._lost)
        self._lost = "a call of the learner broke off, so that its ranks may hold different weights"
        try:
            yield
        except RuntimeError as error:  # of torch.distributed, and of CUDA
            self._lost = _lost_each_other(error)
            raise LearnerError(self._lost) from error
        self._lost = ""


def _lost_each_other(error: RuntimeError) -> str:
    return f"the ranks of the learner lost each other: {' '.join(str(error).split())}"


def serve(group: RankGroup) -> None:
    """Follow rank 0 until it says stop; on every other rank.

    Raises:
        RuntimeError: rank 0 is gone, or torch refused.
    """
    part: ShardedLearner | None = None
    while (message := group.hear()).values["command"] != "stop":
        if message.values["command"] == "build":
            part = None  # its memory is free before another one's is taken
            part = _build(group, message.values)
            group.answer(Message({}))
        elif part is None:
            raise LearnerError(f"rank {group.rank} has no model yet and was told to {message.values['command']}")
        elif message.values["command"] == "gather":
            part.gather(message.values["unit"], message.values["merged"]).wait()
        else:
            group.answer(_respond(part, message))


def _build(group: RankGroup, values: Mapping[str, Any]) -> ShardedLearner:
    config = TrainConfig.model_validate(values["config"])
    loss_named(config.loss)  # one of the user's own must be there on every rank; in a step the others would wait
    return ShardedLearner(group, values["model_path"], config, seed=values["seed"], served_dtype=values["served_dtype"])


def _check(others: Sequence[Message]) -> None:
    """Raise for a rank that failed where rank 0 did not: they do not hold the same any more."""
    for rank, answer in enumerate(others, start=1):
        if "error" in answer.values:
            raise LearnerError(f"rank {rank} of the learner failed: {answer.values['error']['message']}")


def _respond(part: ShardedLearner, message: Message) -> Message:
    """Do a command; what Penstock refuses is part of the answer, and the same on every rank."""
    values = dict(message.values)
    command = COMMANDS[values.pop("command")]
    try:
        return command(part, values, message.tensors) or Message({})
    except PenstockError as error:
        return Message({"error": error_to_json(error)})


def _evaluate(name: str) -> Command:
    def command(part: ShardedLearner, values: dict[str, Any], tensors: Mapping[str, Tensor]) -> Message:
        loss = _LOSS.validate_python(values["loss"])
        outputs: Outputs = getattr(part, name)(values["adapter"], loss, unpack(tensors))
        sums = {kind: dict(getattr(outputs, kind)) for kind in ("losses", "denominators", "metrics")}
        return Message(sums, {"logprobs": torch.cat([torch.zeros(0), *outputs.logprobs])})

    return command


def _optim_step(part: ShardedLearner, values: dict[str, Any], _: Mapping[str, Tensor]) -> Message:
    figures = part.optim_step(values["adapter"], AdamSpec(**values["adam"]), scale=values["scale"])
    return Message(asdict(figures))


def _save(part: ShardedLearner, values: dict[str, Any], _: Mapping[str, Tensor]) -> Message:
    return Message(part.save(values["adapter"], Path(values["folder"])))


Command = Callable[[ShardedLearner, dict[str, Any], Mapping[str, Tensor]], Message | None]
COMMANDS: Mapping[str, Command] = {
    "forward": _evaluate("forward"),
    "forward_backward": _evaluate("forward_backward"),
    "optim_step": _optim_step,
    "create_adapter": lambda part, values, _: part.create_adapter(values["name"], LoraSpec(**values["spec"])),
    "drop_adapter": lambda part, values, _: part.drop_adapter(values["name"]),
    "release_memory": lambda part, _, __: part.release_memory(),
    "set_adapter": lambda part, values, tensors: part.set_adapter(values["name"], tensors),
    "save": _save,
    "load": lambda part, values, _: part.load(values["adapter"], Path(values["folder"]), values["values"]),
}


def pack(data: Sequence[Datum]) -> dict[str, Tensor]:
    """Data as one tensor for each field, and the length that each datum's has there; -1: it has none."""
    rows = [{**{name: getattr(d, name) for name in _FIELDS}, **_named(d.extra)} for d in data]
    packed: dict[str, Tensor] = {}
    for name in dict.fromkeys((*_FIELDS, *(name for row in rows for name in row))):
        values, dtype = [row.get(name) for row in rows], _dtype(name)
        packed[f"lengths/{name}"] = torch.tensor([-1 if v is None else len(v) for v in values], dtype=torch.int64)
        given = [torch.as_tensor(value, dtype=dtype) for value in values if value is not None]
        packed[name] = torch.cat([torch.zeros(0, dtype=dtype), *given])
    return packed


def unpack(packed: Mapping[str, Tensor]) -> list[Datum]:
    """Read what `pack` made."""
    columns: dict[str, list[Tensor | None]] = {}
    for name in (name for name in packed if not name.startswith("lengths/")):
        lengths: list[int] = packed[f"lengths/{name}"].tolist()
        parts = iter(packed[name].split([length for length in lengths if length >= 0]))
        columns[name] = [None if length < 0 else next(parts) for length in lengths]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [_datum(row) for row in rows]


_FIELDS = tuple(field.name for field in fields(Datum) if field.name != "extra")
_EXTRA = "extra/"


def _named(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {_EXTRA + name: values for name, values in extra.items()}


def _datum(row: Mapping[str, Any]) -> Datum:
    extra = {name.removeprefix(_EXTRA): v for name, v in row.items() if name.startswith(_EXTRA) and v is not None}
    return Datum(**{name: row[name] for name in _FIELDS}, extra=extra)


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name in {"input_ids", "target_ids", "positions", "experts"} else torch.float32


def _added(parts: Iterator[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
