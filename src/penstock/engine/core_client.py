"""Calls to an engine's core, and among them those that give it new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.control_types import KV, EngineUpdate
from penstock.errors import EngineHTTPError, TransferError, WeightsError
from penstock.http import TORN, HttpTransport, UnreachableError
from penstock.weights.manifest import WeightManifest

BAD_REQUEST = 400
NO_CORE = object()


class CoreClient:
    """Calls to one engine's core, each with a deadline of `timeout_s` seconds.

    Every method raises `EngineDeadError`, `DeadlineError` and `EngineHTTPError`.
    """

    def __init__(self, name: str, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self.name = name
        self.url = url
        self.http = HttpTransport(url, api_key=api_key, name=name)
        self.timeout_s = timeout_s
        self._key = api_key
        self._core: HttpTransport | None = None
        self._core_answered = False

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        """Let the engine map and check a version while it generates. Changes nothing.

        WeightsError: names, shapes, dtypes or checksums do not fit.
        """
        await self.offer("prepare", {"manifest": manifest.to_json()})

    async def apply_weights(self, version: int, *, kv: KV = "recompute") -> EngineUpdate:
        """Pause (keep), load the prepared version, label it, resume, in one call.

        One call queues only once. After any error except TransferError, the engine must not serve again.

        Raises:
            TransferError: bytes are missing. It stays paused until a whole version is prepared and applied.
        """
        try:
            answer: Any = await self.at_core("/penstock/weights/apply", {"version": version, "kv": kv})
        except EngineHTTPError as error:
            if error.error_type == TORN:
                raise TransferError(str(error)) from error
            raise
        confirmed = int(answer["version"])
        if confirmed != version:
            message = f"applied weight version {version} but says it serves {confirmed}"
            raise EngineHTTPError(message, status=200, engine=self.name)
        return self.update_of(answer)

    async def close(self) -> None:
        await self.http.close()
        if self._core is not None:
            await self._core.close()

    def update_of(self, answer: Any) -> EngineUpdate:
        """Read an engine's report about an update."""
        return EngineUpdate(
            engine=self.name,
            seconds={str(k): float(v) for k, v in answer["seconds"].items()},
            preempted=int(answer["preempted"]),
            checksum=str(answer.get("checksum", "")),
            kept=int(answer["kept"]),
        )

    async def offer(self, step: str, body: Mapping[str, Any], *, refused: Sequence[int] = (BAD_REQUEST,)) -> None:
        """Make the weights call `step` of the core. WeightsError: it answers with a status of `refused`."""
        try:
            await self.at_core(f"/penstock/weights/{step}", body)
        except EngineHTTPError as error:
            if error.status in refused:
                raise WeightsError(str(error)) from error
            raise

    async def at_core(
        self, path: str, body: Mapping[str, Any], timeout_s: float | None = None, *, otherwise: str | None = None
    ) -> Any:
        """Ask the core, else the API server at the same path or vLLM's `otherwise`."""
        answer = await self._ask_core(path, body, timeout_s or self.timeout_s)
        if answer is not NO_CORE:
            return answer
        if otherwise is None:
            return await self.post(path, body, timeout_s=timeout_s)
        return await self.post(otherwise, timeout_s=timeout_s)

    async def _ask_core(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """Ask the core. Return `NO_CORE` if only the API server is reachable.

        A proxy or a mapped port may hide the core. UnreachableError: the core has answered before, so it has died.
        """
        if self._core is None:
            return NO_CORE
        try:
            answer = await self._core.post(path, body, timeout_s=timeout_s)
        except UnreachableError:  # the request was not sent
            if self._core_answered:
                raise
            await self._core.close()
            self._core = None
            return NO_CORE
        self._core_answered = True
        return answer

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        """Call the API server."""
        return await self.http.post(path, body, timeout_s=timeout_s or self.timeout_s)
