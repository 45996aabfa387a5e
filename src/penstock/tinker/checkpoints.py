"""Checkpoints: `tinker://` paths, and their folders in the data folder."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from penstock.errors import UserError
from penstock.tinker.database import Database, checkpoints, samplers

SCHEME = "tinker://"
TYPES = {"weights": "training", "sampler_weights": "sampler"}
"""Kinds of checkpoint (the second part of a path), with the SDK's names."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A path `tinker://MODEL/KIND/NAME`."""

    model: str
    kind: str
    name: str

    @classmethod
    def of(cls, given: str) -> TinkerPath:
        """Parse a path. UserError: it is malformed, or could name a file outside the data folder."""
        parts = given.removeprefix(SCHEME).split("/") if given.startswith(SCHEME) else []
        if len(parts) != 3 or parts[1] not in TYPES or not _MODEL.fullmatch(parts[0]):  # noqa: PLR2004
            shown = f"{SCHEME}RUN/weights/NAME or {SCHEME}RUN/sampler_weights/NAME"
            raise UserError(f"{given[:200]!r} is no path of this service; give {shown}")
        return cls(parts[0], parts[1], checked_name(parts[2]))

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


def checked_name(name: str) -> str:
    """Return the name of a checkpoint if it is valid. UserError: it is not."""
    if not _NAME.fullmatch(name):
        raise UserError(f"a checkpoint's name has letters, digits, '.', '_' and '-', at most 128; got {name[:200]!r}")
    return name


class MissingError(UserError):
    """The tenant has no checkpoint at the path."""


class Checkpoints:
    """The checkpoints of a service."""

    def __init__(self, database: Database, data: Path) -> None:
        self._database = database
        self._data = data

    def at(self, folder: str) -> Path:
        """Return where a folder of a row lies. Rows name it within the data folder, which may be moved."""
        return self._data / folder

    async def find(self, tenant: str, given: str, *kinds: str) -> Row[Any]:
        """Return the row of a checkpoint that a tenant may read.

        Raises:
            MissingError: it does not exist, has expired, or is another tenant's and not public.
            UserError: the path is malformed, or its kind is not in `kinds`.
        """
        path = TinkerPath.of(given)
        if kinds and path.kind not in kinds:
            raise UserError(f"{given} is of kind {path.kind}; this takes {' or '.join(kinds)}")
        row = await self.row(path)
        if row is None or (row.tenant != tenant and not row.public) or _expired(row):
            raise MissingError(f"there is no checkpoint {given}; it was never saved, was deleted, or has expired")
        return row

    async def exists(self, path: TinkerPath) -> bool:
        """Return whether the path has a checkpoint that has not expired."""
        row = await self.row(path)
        return row is not None and not _expired(row)

    async def row(self, path: TinkerPath) -> Row[Any] | None:
        """Return the row of a path, even if the checkpoint has expired."""
        wanted = select(checkpoints).where(checkpoints.c.path == str(path))
        return await self._database.run(lambda c: c.execute(wanted).first())

    async def listed(
        self, tenant: str, model: str | None, limit: int | None, offset: int
    ) -> tuple[list[Row[Any]], int]:
        """Return a tenant's checkpoints (of one model or all, newest first) and their total."""
        live = (checkpoints.c.expires.is_(None)) | (checkpoints.c.expires > time.time())
        mine = (checkpoints.c.tenant == tenant) & live
        if model is not None:
            mine &= checkpoints.c.model == model
        rows = select(checkpoints).where(mine).order_by(checkpoints.c.created.desc()).limit(limit).offset(offset)
        count = select(func.count()).select_from(checkpoints).where(mine)
        return await self._database.run(lambda c: (list(c.execute(rows).all()), int(c.execute(count).scalar_one())))

    async def change(self, tenant: str, path: TinkerPath, **values: Any) -> None:
        """Change a tenant's own checkpoint. MissingError: the tenant has no such checkpoint."""
        mine = (checkpoints.c.path == str(path)) & (checkpoints.c.tenant == tenant)
        change = update(checkpoints).where(mine).values(**values)
        if not await self._database.run(lambda c: c.execute(change).rowcount):
            raise MissingError(f"there is no checkpoint {path}")

    async def remove(self, tenant: str, path: TinkerPath) -> None:
        """Delete a tenant's own checkpoint. MissingError: the tenant has no such checkpoint."""
        row = await self.find(tenant, str(path))
        if row.tenant != tenant:
            raise MissingError(f"there is no checkpoint {path}")
        await self._drop(row)

    async def expire(self) -> None:
        """Delete expired checkpoints."""
        old = select(checkpoints).where(checkpoints.c.expires <= time.time())
        for row in await self._database.run(lambda c: list(c.execute(old).all())):
            await self._drop(row)

    async def _drop(self, row: Row[Any]) -> None:
        gone = delete(checkpoints).where((checkpoints.c.path == row.path) & (checkpoints.c.folder == row.folder))
        used = select(samplers.c.id).where(samplers.c.folder == row.folder).limit(1)
        in_use = await self._database.run(lambda c: (c.execute(gone), c.execute(used).first())[1])
        if in_use is None:
            await self.delete(row.folder)
        # A folder that a sampler reads stays on disk until it is no longer used (`Sessions.unused_folders`).

    async def delete(self, folder: str) -> None:
        """Delete a folder that no row names. A load that reads it fails."""
        try:
            await asyncio.to_thread(shutil.rmtree, self.at(folder))
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("the folder %s cannot be deleted: %s", folder, error)


def folder_of(path: TinkerPath, number: int) -> str:
    """Return a folder for one save only. An old checkpoint stays complete until the new one is."""
    return f"checkpoints/{_plain(path.model)}/{path.kind}/{path.name}@{number}"


def sampler_folder(model: str, name: str) -> str:
    """Return the folder of a sampler that has no path."""
    return f"samplers/{_plain(model)}/{_plain(name)}"


def size_of(folder: Path) -> int:
    """Return the total bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def record(connection: Connection, path: TinkerPath, values: Mapping[str, Any]) -> None:
    """Record a checkpoint on disk under its path, replacing an earlier one."""
    connection.execute(delete(checkpoints).where(checkpoints.c.path == str(path)))
    row = {"path": str(path), "model": path.model, "kind": path.kind, "created": time.time(), "public": False}
    connection.execute(insert(checkpoints).values({**row, **values}))


def as_json(row: Row[Any]) -> dict[str, Any]:
    """Return the row as the SDK's `Checkpoint`."""
    path = TinkerPath.of(row.path)
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": TYPES[path.kind],
        "time": when(row.created),
        "tinker_path": row.path,
        "size_bytes": row.size,
        "public": row.public,
        "user_metadata": row.user_metadata,
        "expires_at": None if row.expires is None else when(row.expires),
    }


def when(seconds: float) -> str:
    """Return a time in the form that the SDK reads."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _expired(row: Row[Any]) -> bool:
    return row.expires is not None and row.expires <= time.time()


def _plain(name: str) -> str:
    return name.replace(":", "_")
