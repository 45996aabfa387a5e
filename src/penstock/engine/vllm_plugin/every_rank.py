"""A worker method on every worker of an engine, and what every one of them answered."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from penstock.errors import WeightsError
from penstock.weights.manifest import kind_of


async def on_every_rank(engine: Any, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
    """Call a worker method on every rank of vLLM's `engine` (its AsyncLLM).

    Returns:
        Answers of shape `[dp * pp * tp]`: those of the first replica by rank, then those of the second, and so on.
    """
    hear_all(engine)
    return await engine.collective_rpc(method, args=args)


def hear_all(engine: Any) -> None:
    """Make the engine's `collective_rpc` return what every rank answered; again is harmless.

    VLLM's own calls all of them too, but of several data-parallel replicas it returns only what the first one answered
    (0.26 to 0.32: `DPLBAsyncMPClient.call_utility_async`), so what went wrong on the others, and what weights they
    have, stays unknown.
    """
    client = engine.engine_core
    if len(getattr(client, "core_engines", ())) > 1:  # each the core of one replica
        client.collective_rpc_async = functools.partial(_of_all_cores, client)


async def _of_all_cores(
    client: Any,
    method: Any,
    timeout: float | None = None,  # noqa: ASYNC109 - as vLLM's
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    one = client._call_utility_async  # noqa: SLF001 - the public call keeps the first answer only
    calls = (one("collective_rpc", method, timeout, args, kwargs, engine=core) for core in client.core_engines)
    return [answer for of_replica in await asyncio.gather(*calls) for answer in of_replica]


def check_replicas(checksums: Sequence[str], replicas: int) -> None:
    """Compare the data-parallel replicas of a dense model rank by rank, like with like (`manifest.kind_of`).

    A mixture of experts must not be compared: vLLM spreads its experts over the replicas.

    Args:
        checksums: of every rank, shape `[replicas * ranks of one]`, as `on_every_rank` orders them.
        replicas: how many.

    Raises:
        WeightsError: a replica has other weights than one before it; the engine must not serve.
    """
    ranks = len(checksums) // replicas
    said: dict[tuple[int, str], tuple[int, str]] = {}
    for place, own in enumerate(checksums):
        replica, rank = divmod(place, ranks)
        other, first = said.setdefault((rank, kind_of(own)), (replica, own))
        if own != first:
            raise WeightsError(
                f"data-parallel replica {replica} has on rank {rank} weights of checksum {own}, replica {other} of "
                f"{first}: they would answer differently"
            )
