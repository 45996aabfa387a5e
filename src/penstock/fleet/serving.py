"""The part of a fleet that a request, an update and its end need; `fleet.Fleet` adds all other calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack, closing
from typing import TYPE_CHECKING, Any, Self, TypeVar

from penstock.aio import settled
from penstock.control_types import KV, NamedTensors, UpdateReport
from penstock.engine.client import DataClient
from penstock.engine.interface import Engine
from penstock.errors import EngineError, StateError
from penstock.fleet.roster import Roster
from penstock.weights.manifest import as_named_tensors

if TYPE_CHECKING:
    from penstock.fleet.update import Operations

T = TypeVar("T")


class ServingFleet(Engine):
    """Engines behind one router that generate, take new weights and end together."""

    def __init__(
        self, url: str, roster: Roster, operations: Operations, data: DataClient, owned: AsyncExitStack
    ) -> None:
        self.url = url
        """The router's address: an OpenAI endpoint for all engines together."""
        self._roster = roster
        self._all_lost = roster.all_lost
        self._operations: Any = operations
        self.data = data
        data.kept = lambda: roster.kv_kept_versions
        self._owned = owned
        self._ending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.teardown()

    @property
    def weight_version(self) -> int:
        """Version that every serving engine has confirmed: 0 as loaded; updates raise it."""
        return self._roster.version

    async def while_serving(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `data`'s request; EngineDeadError: no engine is left."""
        with closing(work):
            self._check_open()
            # Requests that find no engine wait in the router, which cannot know whether one will come.
            done = await settled(work, self._all_lost.wait())
        if done.cancelled():
            raise self._roster.lost_error()
        if isinstance(done.exception(), EngineError):
            self._roster.raise_if_lost()
        return done.result()

    async def update_weights(
        self, named_tensors: NamedTensors, *, version: int | None = None, kv: KV = "recompute"
    ) -> UpdateReport:
        """Put new weights in force on every engine while requests are in flight.

        A started update runs to its end even if this call is cancelled.

        Args:
            named_tensors: `(checkpoint name, tensor)` for every tensor of the model, as `model.named_parameters()`
                gives them; tied weights once. A module, or a function that returns the pairs, is asked again when an
                engine needs this version and no copy was kept (docs/how-to/weights.md).
            version: label of the new weights, greater than every earlier one; default: the highest so far + 1. A
                resumed run passes the version that it had reached.
            kv: `recompute`: requests in flight attend only to KV of the new weights, at the price of their prefill.
                `keep`: they go on at once, and cached prefixes stay. Until the next update that recomputes, the spans
                of new tokens say `kv_kept`, and their logprobs belong to no single version. `keep_in_flight`: requests
                that are making tokens go on at once and say `kv_kept`, until they are preempted or continue on another
                engine. All others compute under the new weights alone, and new requests reuse no older KV.

        Raises:
            WeightsError: a missing, extra or misshapen tensor, a wrong dtype, or NaN; the weights are unchanged.
            StateError: another update is under way.
            UpdateError: too few engines committed it; the old version is still served.
        """
        return await self._operations.update(as_named_tensors(named_tensors), version, kv=kv)

    async def teardown(self) -> None:
        """End what this object launched; requests in flight fail. Repeating is harmless."""
        if self._ending is None:
            self._roster.end()
            self._ending = asyncio.create_task(self._end(), name="fleet-teardown")
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        async with self._owned:
            await self._operations.close()

    def _check_open(self) -> None:
        if self._ending is not None:
            raise self._ended()

    def _ended(self) -> StateError:
        return StateError("this fleet was torn down")
