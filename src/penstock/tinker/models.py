"""The models of a learner process: one adapter each, saved and restored."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from penstock.checks import parse_json, reading
from penstock.errors import CheckpointError, StateError, UserError
from penstock.tinker.training_data import Batch
from penstock.train.interface import AdamSpec, Learner, LoraSpec, Outputs
from penstock.weights.adapter_files import SETTINGS, TENSORS

logger = logging.getLogger(__name__)

FORMAT = "penstock-tinker-1"
RECORD, STATE, LAST = "penstock.json", "state", "last"
_OLD, _PART = ".old-", ".part-"
ALPHA = 32.0
"""Alpha of every adapter, as in the hosted service. An adapter is scaled by 32 / rank."""


@dataclass(slots=True)
class Model:
    """State of one model.

    Attributes:
        steps: optimiser steps since its creation.
        saved: folder of its last save or load; None: it was never saved.
        saved_steps: `steps` at that time.
        void: reason why the gradient since the last step is incomplete.
    """

    spec: LoraSpec
    steps: int = 0
    saved: str | None = None
    saved_steps: int = 0
    void: str = ""


@dataclass(slots=True)
class Models:
    """Models by id. Calls block, and must come from one thread at a time.

    Args:
        folder: folder for what a restart needs, used by this object only.
        base_model: name of the base model for clients.
        max_rank: maximum rank of an adapter that the engines take.
    """

    learner: Learner
    folder: Path
    base_model: str
    max_rank: int
    live: dict[str, Model] = field(default_factory=dict[str, Model])

    def restore(self) -> None:
        """Restore every model as it was last saved, or as created if it was never saved.

        A model whose files cannot be read is left out with a log message, so it does not block the others.
        """
        for old in self.folder.glob(f"{_OLD}*"):  # a kill came while its replacement was written
            home = old.with_name(old.name.removeprefix(_OLD))
            shutil.rmtree(old) if home.exists() else old.rename(home)
        for record in sorted(self.folder.glob(f"[!.]*/{RECORD}")):
            try:
                self._restore(record)
            except CheckpointError as error:
                logger.warning("a model is lost, as its files cannot be read: %s", error)

    def _restore(self, record: Path) -> None:
        values, last = _read(record), record.parent / LAST
        with reading(f"record {record}", CheckpointError):
            name, spec, saved = str(values["model_id"]), LoraSpec(**values["spec"]), values["saved"]
            steps = int(values["saved_steps"])
        with ExitStack() as failed:
            self.learner.create_adapter(name, spec)
            failed.callback(self.learner.drop_adapter, name)
            if saved is not None:
                self._load(name, last, optimizer=(last / STATE).is_dir())
            failed.pop_all()
        self.live[name] = Model(spec, steps, saved, steps)

    def create(self, name: str, spec: LoraSpec) -> None:
        """Add a model that answers as the base does. An existing model stays: its creator was cut off before.

        Raises:
            UserError: the engines do not take the rank.
        """
        if spec.rank > self.max_rank:
            raise UserError(
                f"rank {spec.rank} is more than the engines of this service take; use at most {self.max_rank}, or have "
                f"it started with max_lora_rank={spec.rank}"
            )
        if name in self.live:
            return
        self.learner.create_adapter(name, spec)
        self.live[name] = Model(spec)
        with ExitStack() as failed:
            failed.callback(self.drop, name)
            self._keep(name)
            failed.pop_all()

    def drop(self, name: str) -> None:
        """Remove a model, if it exists."""
        if self.live.pop(name, None) is not None:
            self.learner.drop_adapter(name)
            shutil.rmtree(self._home(name), ignore_errors=True)

    def run(self, name: str, batch: Batch) -> Outputs:
        """Evaluate a batch, and add its gradient unless it is forward only."""
        model = self._of(name)
        if batch.forward_only:
            return self.learner.forward(name, batch.loss, batch.data)
        with ExitStack() as failed:
            failed.callback(setattr, model, "void", "a forward_backward before it failed half way")
            outputs = self.learner.forward_backward(name, batch.loss, batch.data)
            failed.pop_all()
        return outputs

    def run_together(self, parts: Sequence[tuple[str, Batch]]) -> list[Outputs]:
        """Evaluate batches of several models and add their gradients. On failure, no gradient is changed."""
        return self.learner.forward_backward_together(
            [(name, batch.loss, batch.data) for name, batch in parts if self._of(name)]
        )

    def void(self, name: str, reason: str) -> None:
        """Make the model's next step fail and drop its gradient. Some of its data could not be evaluated."""
        if name in self.live:
            self.live[name].void = f"a forward_backward before it failed ({reason})"

    def step(self, name: str, adam: AdamSpec) -> float:
        """Take an optimiser step.

        Raises:
            StateError: the gradient is incomplete or not finite. It is dropped; the weights are unchanged.
        """
        model = self._of(name)
        if model.void:
            reason, model.void = model.void, ""
            self.learner.discard_gradient(name)
            raise StateError(f"no step was taken: {reason}, so its gradient was dropped; send the data again")
        grad_norm = self.learner.optim_step(name, adam, scale=1.0)
        model.steps += 1
        return grad_norm

    def save(self, name: str, folder: Path) -> None:
        """Write weights and optimiser to a folder, as PEFT's files and a state. A restart restores this save."""
        model = self._of(name)
        _write(folder, lambda part: self._write_all(name, part))
        model.saved, model.saved_steps = str(folder), model.steps
        self._keep(name, folder)

    def writer(self, name: str) -> Callable[[Path], None]:
        """Copy a model's weights. Return a function that writes them to a folder as PEFT's files, in any thread.

        An existing folder stays complete at all times.
        """
        self._of(name)
        write = self._weights_writer(name)
        return lambda folder: _write(folder, write)

    def load(self, name: str, folder: Path, *, optimizer: bool) -> None:
        """Load a checkpoint into a model. A missing model is created with the checkpoint's adapter.

        Raises:
            UserError: it has no optimiser state, or belongs to another adapter; nothing was changed.
            CheckpointError: it cannot be read.
        """
        held = self.folder / f"{_PART}loading"  # linked, because its folder may be deleted or replaced meanwhile
        shutil.rmtree(held, ignore_errors=True)  # left over from a kill
        try:
            shutil.copytree(folder, held, copy_function=_link)
            self._load_held(name, folder, held, optimizer=optimizer)
        except OSError as error:
            raise CheckpointError(f"cannot read {folder}: {error}") from error
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _load_held(self, name: str, folder: Path, held: Path, *, optimizer: bool) -> None:
        spec = self._spec_of(held)
        if optimizer and not (held / STATE).is_dir():
            raise UserError("the checkpoint holds weights without an optimiser state; load it without the optimiser")
        created = name not in self.live
        if created:
            self.create(name, spec)
        elif replace(self.live[name].spec, seed=spec.seed) != spec:
            raise UserError(
                f"the checkpoint's adapter is {_words(spec)}, and the model's {_words(self.live[name].spec)}"
            )
        with ExitStack() as failed:
            if created:
                failed.callback(self.drop, name)
            self._load(name, held, optimizer=optimizer)
            failed.pop_all()
        model = self.live[name]
        model.saved, model.saved_steps, model.void = str(folder), model.steps, ""
        self._keep(name, held, with_state=optimizer)

    def status(self) -> dict[str, dict[str, Any]]:
        """Return each model's steps, and the folder and the steps of its last save."""
        return {
            name: {"steps": model.steps, "saved": model.saved, "saved_steps": model.saved_steps}
            for name, model in list(self.live.items())  # a copy, because the learner's thread adds and drops models
        }

    def _of(self, name: str) -> Model:
        if (model := self.live.get(name)) is None:
            raise UserError(f"the learner has no model {name!r}; create it, or load it from a checkpoint")
        return model

    def _home(self, name: str) -> Path:
        return self.folder / quote(name, safe="")

    def _load(self, name: str, folder: Path, *, optimizer: bool) -> None:
        if optimizer:
            self.learner.load(name, folder / STATE, _read(folder / RECORD)["values"])
            return
        try:
            tensors = load_file(folder / TENSORS)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {folder / TENSORS}: {error}") from error
        self.learner.set_adapter(name, tensors)

    def _spec_of(self, folder: Path) -> LoraSpec:
        values = _read(folder / RECORD)
        with reading(f"checkpoint {folder}", CheckpointError):
            if values["format"] != FORMAT:
                raise CheckpointError(f"{folder} is a checkpoint of another Penstock: {values['format']!r}")
            if values["base_model"] != self.base_model:
                raise UserError(
                    f"the checkpoint is of {values['base_model']!r}; this service trains {self.base_model!r}"
                )
            return LoraSpec(**values["spec"])

    def _write_all(self, name: str, folder: Path) -> None:
        (folder / STATE).mkdir()
        values = self.learner.save(name, folder / STATE)
        self._weights_writer(name, values)(folder)

    def _weights_writer(self, name: str, values: Mapping[str, Any] | None = None) -> Callable[[Path], None]:
        named = dict(self.learner.weights(name))
        # Copied in one piece: on a device that engines use too, each copy waits for its own turn.
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in named.values()]).cpu()
        parts = cast("list[torch.Tensor]", torch.split(flat, [tensor.numel() for tensor in named.values()]))
        tensors = {key: part.view_as(each) for part, (key, each) in zip(parts, named.items(), strict=True)}
        config = {**self.learner.adapter_config(name), "base_model_name_or_path": self.base_model}
        spec = asdict(self.live[name].spec)
        record = {"format": FORMAT, "base_model": self.base_model, "spec": spec, "values": values}

        def write(folder: Path) -> None:
            if not flat.isfinite().all():
                broken = [key for key, tensor in tensors.items() if not tensor.isfinite().all()]
                raise UserError(f"{len(broken)} tensors of the adapter, {broken[0]} the first, hold NaN or infinity")
            save_file({key: tensor.numpy() for key, tensor in tensors.items()}, folder / TENSORS, {"format": "pt"})
            (folder / SETTINGS).write_text(json.dumps(config, default=str))
            (folder / RECORD).write_text(json.dumps(record))

        return write

    def _keep(self, name: str, saved: Path | None = None, *, with_state: bool = True) -> None:
        """Keep what a restart needs. The files of a save are linked, because its folder may be deleted."""
        home, model = self._home(name), self.live[name]
        values = {"model_id": name, "spec": asdict(model.spec), "saved": model.saved, "saved_steps": model.saved_steps}

        def write(part: Path) -> None:
            (part / RECORD).write_text(json.dumps(values))
            if saved is not None:
                left_out = None if with_state else shutil.ignore_patterns(STATE)
                shutil.copytree(saved, part / LAST, copy_function=_link, ignore=left_out)

        home.parent.mkdir(parents=True, exist_ok=True)
        old = home.with_name(f"{_OLD}{home.name}")
        with ExitStack() as failed:
            if home.exists():
                home.rename(old)
                failed.callback(old.rename, home)  # else a restart would bring it back even after a drop
            _write(home, write)
            failed.pop_all()
        shutil.rmtree(old, ignore_errors=True)


def _words(spec: LoraSpec) -> str:
    return ", ".join(f"{key}={value}" for key, value in asdict(spec).items() if key not in {"seed", "alpha"})


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _read(file: Path) -> dict[str, Any]:
    try:
        return parse_json(file.read_bytes(), str(file), CheckpointError)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    """Write files to a temporary folder. Then move them into place: the whole folder, or file by file.

    Raises:
        CheckpointError: the disk refused.
    """
    part = folder.with_name(f"{_PART}{folder.name}")
    try:
        shutil.rmtree(part, ignore_errors=True)  # left over from a kill
        part.mkdir(parents=True)
        write(part)
        if folder.is_dir():
            for file in part.iterdir():
                if (there := folder / file.name).is_dir():
                    shutil.rmtree(there)
                file.replace(there)
            part.rmdir()
        else:
            part.rename(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error}; free space and save again") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
