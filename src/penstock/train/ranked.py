"""A learner of several ranks, on rank 0 and on the others. Each call is a command to all."""

# torch ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from penstock.config import TrainConfig
from penstock.errors import LearnerError, PenstockError
from penstock.start_report import error_from_json, error_to_json
from penstock.train.fsdp import REFUSED_ELSEWHERE, Gathering, ShardedLearner
from penstock.train.interface import AdamSpec, Datum, Learner, LoraSpec, Outputs
from penstock.train.learner import ServedDtype
from penstock.train.losses import LossSpec, loss_named
from penstock.train.rank_group import Message, RankGroup
from penstock.weights.manifest import TensorProvider


class RankedLearner(Learner):
    """The learner of all ranks. It lives on rank 0 and holds one shard itself; the other ranks run `serve`.

    Any thread may call it, one at a time. Another thread may read `weights` at the same time.

    Raises:
        ConfigError: see `PolicyModel`.
        LearnerError: a rank was lost. Every later call raises it too.
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
        return self._part.versions

    def forward(self, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        return self._run("forward", adapter, loss, data)

    def forward_backward(self, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        return self._run("forward_backward", adapter, loss, data)

    def optim_step(self, adapter: str | None, adam: AdamSpec, *, scale: float) -> float:
        return self._call("optim_step", adapter=adapter, adam=adam, scale=scale)[0].values["returned"]

    def discard_gradient(self, adapter: str | None) -> None:
        self._call("discard_gradient", adapter=adapter)

    def create_adapter(self, name: str, spec: LoraSpec) -> None:
        self._call("create_adapter", name=name, spec=spec)

    def drop_adapter(self, name: str) -> None:
        self._call("drop_adapter", name=name)

    def set_adapter(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._call("set_adapter", tensors, name=name)

    def adapter_config(self, name: str) -> Mapping[str, Any]:
        return self._part.adapter_config(name)

    def weights(self, adapter: str | None) -> TensorProvider:
        """See `Learner.weights`. Each pass gathers layer by layer; the next layer is gathered while one is sent."""
        part = self._part
        if adapter is not None:  # every rank holds the whole adapter
            return TensorProvider(lambda: part.weights(adapter))
        return TensorProvider(self._gather_all, specs=part.specs)

    def merged_weights(self, adapter: str) -> TensorProvider:
        self._part.check_merging(adapter)
        return TensorProvider(lambda: self._gather_all(adapter), specs=self._part.specs)

    def save(self, adapter: str | None, folder: Path) -> Mapping[str, Any]:
        """See `Learner.save`. Every rank writes its shard, so all ranks must see the folder."""
        return self._call("save", adapter=adapter, folder=folder.resolve())[0].values["returned"]

    def load(self, adapter: str | None, folder: Path, values: Mapping[str, Any]) -> None:
        self._call("load", adapter=adapter, folder=folder.resolve(), values=dict(values))

    def release_memory(self) -> None:
        self._call("release_memory")

    def stop(self) -> None:
        """End the other ranks, if no rank is lost."""
        if not self._lost:
            with self._lock, self._together():
                self._group.tell(Message({"command": "stop"}))
            self._lost = "the learner was stopped"

    def _run(self, command: str, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        answers = self._call(command, pack(data), adapter=adapter, loss=loss)
        logprobs = torch.stack([answer.tensors["logprobs"] for answer in answers]).sum(0)  # 0 for other ranks' data
        sums: dict[str, dict[str, float]] = {}
        for kind in _SUMS:
            total = Counter[str]()
            for answer in answers:
                total.update(answer.values[kind])
            sums[kind] = dict(total)  # a Counter would return 0 for a missing loss
        return Outputs(logprobs.split([len(datum.target_ids) for datum in data]), **sums)

    def _call(self, command: str, tensors: Mapping[str, Tensor] | None = None, **given: Any) -> list[Message]:
        """Make every rank call a method of its learner. Return the answers of all ranks."""
        values = {n: _TYPED[n].dump_python(v, mode="json") if n in _TYPED else v for n, v in given.items()}
        message = Message({"command": command, **values}, tensors or {})
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
            tensors = self._take(following.pop(), merged)
            begun = False
            while tensors:
                # Each tensor is released once yielded, so only the following unit is held in addition.
                yield tensors.pop(0)
                if not begun:  # the reader has now released the unit before
                    following += [self._gather(unit, merged) for unit in itertools.islice(units, 1)]
                    begun = True

    def _gather(self, unit: int, merged: str | None) -> dict[str, Gathering]:
        with self._lock, self._together():
            self._group.tell(Message({"command": "gather", "unit": unit, "merged": merged}))
            return self._part.gather(unit, merged)

    def _take(self, gathering: dict[str, Gathering], merged: str | None) -> list[tuple[str, Tensor]]:
        try:
            return self._part.take(gathering, merged)
        except RuntimeError as error:  # outside the lock: a step may run now, and will fail too
            self._lost = _lost_each_other(error)
            raise LearnerError(self._lost) from error

    @contextmanager
    def _together(self) -> Generator[None]:
        """Guard a call that all ranks make together. If it breaks off, the ranks are out of step."""
        if self._lost:
            raise LearnerError(self._lost)
        self._lost = "a call of the learner broke off, so that its ranks may hold different weights"
        try:
            yield
        except RuntimeError as error:  # from torch.distributed or CUDA
            self._lost = _lost_each_other(error)
            raise LearnerError(self._lost) from error
        self._lost = ""


def _lost_each_other(error: RuntimeError) -> str:
    return f"the ranks of the learner lost each other: {' '.join(str(error).split())}"


def serve(group: RankGroup) -> None:
    """Follow rank 0 until it says stop; called on every other rank.

    Raises:
        RuntimeError: rank 0 is gone, or torch failed.
    """
    part: ShardedLearner | None = None
    while (message := group.hear()).values["command"] != "stop":
        if message.values["command"] == "build":
            part = None  # free its memory before the new learner takes some
            part = _build(group, message.values)
            group.answer(Message({}))
        elif part is None:
            raise LearnerError(f"rank {group.rank} has no model yet and was told to {message.values['command']}")
        elif message.values["command"] == "gather":
            for gathering in part.gather(message.values["unit"], message.values["merged"]).values():
                gathering.wait()
        else:
            group.answer(_respond(part, message))


def _build(group: RankGroup, values: Mapping[str, Any]) -> ShardedLearner:
    config = TrainConfig.model_validate(values["config"])
    loss_named(config.loss)  # check on every rank that a user's loss exists; in a step, the others would wait
    return ShardedLearner(group, values["model_path"], config, seed=values["seed"], served_dtype=values["served_dtype"])


def _check(others: Sequence[Message]) -> None:
    """Raise if another rank failed where rank 0 did not. The ranks then hold different states."""
    for rank, answer in enumerate(others, start=1):
        if "error" in answer.values:
            raise LearnerError(f"rank {rank} of the learner failed: {answer.values['error']['message']}")


def _respond(part: ShardedLearner, message: Message) -> Message:
    """Execute a command. Errors that Penstock raises go into the answer, and are the same on every rank."""
    given = {n: _TYPED[n].validate_python(v) if n in _TYPED else v for n, v in message.values.items()}
    command = given.pop("command")
    if (name := COMMANDS[command]) is not None:
        given[name] = unpack(message.tensors) if name == "data" else message.tensors
    try:
        found: Any = getattr(part, command)(**given)
    except PenstockError as error:
        return Message({"error": error_to_json(error)})
    if isinstance(found, Outputs):
        logprobs = torch.cat([torch.zeros(0), *found.logprobs])
        return Message({kind: dict(getattr(found, kind)) for kind in _SUMS}, {"logprobs": logprobs})
    return Message({"returned": found})


def pack(data: Sequence[Datum]) -> dict[str, Tensor]:
    """Pack data as one tensor per field, and each datum's length in it; -1: the datum has no such field."""
    extra = dict.fromkeys(_EXTRA + name for datum in data for name in datum.extra)
    packed: dict[str, Tensor] = {}
    for name in (*_FIELDS, *extra):
        values = [d.extra.get(name.removeprefix(_EXTRA)) if name in extra else getattr(d, name) for d in data]
        dtype = torch.int64 if name in _WHOLE else torch.float32
        packed[f"lengths/{name}"] = torch.tensor([-1 if v is None else len(v) for v in values], dtype=torch.int64)
        given = [torch.as_tensor(value, dtype=dtype) for value in values if value is not None]
        packed[name] = torch.cat([torch.zeros(0, dtype=dtype), *given])
    return packed


def unpack(packed: Mapping[str, Tensor]) -> list[Datum]:
    """Read data that `pack` made."""
    columns: dict[str, list[Tensor | None]] = {}
    for name in (name for name in packed if not name.startswith("lengths/")):
        lengths: list[int] = packed[f"lengths/{name}"].tolist()
        parts = iter(packed[name].split([length for length in lengths if length >= 0]))
        columns[name] = [None if length < 0 else next(parts) for length in lengths]
    rows: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    extra = [name for name in columns if name.startswith(_EXTRA)]
    return [
        Datum(
            **{name: row[name] for name in _FIELDS},
            extra={name.removeprefix(_EXTRA): row[name] for name in extra if row[name] is not None},
        )
        for row in rows
    ]


COMMANDS: Mapping[str, str | None] = {
    "forward": "data", "forward_backward": "data", "set_adapter": "tensors",
    **dict.fromkeys(
        ("optim_step", "discard_gradient", "create_adapter", "drop_adapter", "release_memory", "save", "load")
    ),
}  # fmt: skip
"""Methods that all ranks call together, and the argument that a message's tensors hold."""
_TYPED: Mapping[str, TypeAdapter[Any]] = {
    "loss": TypeAdapter(LossSpec), "adam": TypeAdapter(AdamSpec), "spec": TypeAdapter(LoraSpec),
    "folder": TypeAdapter(Path),
}  # fmt: skip
"""Arguments that are not JSON themselves, by name."""
_SUMS = ("losses", "denominators", "metrics")
_FIELDS = tuple(field.name for field in fields(Datum) if field.name != "extra")
_EXTRA = "extra/"
_WHOLE = {"input_ids", "target_ids", "positions", "experts"}
