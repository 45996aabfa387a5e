"""What a fleet's client asks of its control plane, be it in this process or, over a socket, in another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.config import ServerSpec
from penstock.fleet.fan_out import FanOut
from penstock.types import KV, PauseMode, UpdateReport

if TYPE_CHECKING:
    import torch


class Orders(Protocol):
    """What is done with every engine; `operations.Operations` here, `adopt.RemoteOrders` from elsewhere."""

    async def pause(  # noqa: D102 - as in Operations, all of them
        self, mode: PauseMode, *, clear_cache: bool, timeout_s: float | None = None
    ) -> None: ...
    async def resume(self) -> None: ...  # noqa: D102
    async def abort(self) -> None: ...  # noqa: D102
    async def reset_prefix_cache(self) -> None: ...  # noqa: D102
    async def sleep(self, level: int) -> None: ...  # noqa: D102
    async def wake_up(self, tags: Sequence[str] | None) -> None: ...  # noqa: D102
    async def collective_rpc(  # noqa: D102
        self, method: str, timeout_s: float, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> FanOut[list[Any]]: ...
    async def load_adapter(self, name: str, path: str, timeout_s: float) -> None: ...  # noqa: D102
    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None: ...  # noqa: D102
    async def native_update(self, update_info: Mapping[str, Any], version: int) -> None: ...  # noqa: D102
    async def update(  # noqa: D102
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int | None, *, kv: KV = "recompute"
    ) -> UpdateReport: ...
    async def close(self) -> None: ...  # noqa: D102


class Crew(Protocol):
    """What is done with the number of engines; `elastic.Elastic` here, `adopt.RemoteOrders` from elsewhere."""

    async def add(self, count: int) -> tuple[str, ...]: ...  # noqa: D102 - as in Elastic
    async def attach(self, servers: Sequence[ServerSpec]) -> tuple[str, ...]: ...  # noqa: D102
    async def drain(self, engine: str | int, timeout_s: float | None = None) -> bool: ...  # noqa: D102
    async def remove(self, engine: str | int, timeout_s: float | None = None) -> None: ...  # noqa: D102
    async def replace(self, engine: str | int, timeout_s: float | None = None) -> str: ...  # noqa: D102
