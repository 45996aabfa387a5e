"""Control of one engine: what it is and can do, its health, what its core reports, and new weights for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from yarl import URL

from penstock.checks import reading
from penstock.control_types import KV, CoreState, EngineUpdate
from penstock.engine.capabilities import SAMPLED_FROM, EngineInfo
from penstock.errors import DeadlineError, EngineError, EngineHTTPError, PenstockError, TransferError, WeightsError
from penstock.http import TORN, ConnectTimeoutError, HttpTransport, UnreachableError
from penstock.rooms import plugged_in
from penstock.weights.manifest import WeightManifest
from penstock.wire import INFO

BAD_REQUEST = 400
NO_CORE = object()
GONE_S = 3000.0
"""Seconds after which `core_gone` repeats its call. The core keeps such a call for an hour."""


class ControlClient:
    """Calls to one engine's API server and core, each with a deadline of `timeout_s` seconds.

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
        self._dropped: str | None = None  # the core's URL, if a firewall drops what goes there

    @cached_property
    def verbs(self) -> Any:
        """Calls that no update and no restart needs, `verbs.EngineVerbs`."""
        return plugged_in("control.verbs")(self)

    async def info(self) -> EngineInfo:
        """Return the engine's versions, sizes, state and capabilities.

        Raises:
            EngineError: the answer has another form, so this is not our engine.
            EngineHTTPError: the engine has no plugin of ours, or requires another key.
        """
        answer: Any = await self.http.get(INFO, timeout_s=self.timeout_s)
        with reading(f"answer to GET {INFO}", partial(EngineError, engine=self.name)):
            capabilities = {
                "kv_in_flight": answer.get("kv_in_flight", False),
                "sleep": answer.get("sleep", True),
                "lora": answer.get("lora", True),
                "weight_transfer": answer.get("weight_transfer"),
                "sampled_logprobs": answer["logprobs_mode"] in SAMPLED_FROM,
            }
            info = checked_info(**{**answer, "capabilities": capabilities})
            await self._connect_core(answer.get("control_port"))
        return info

    async def health(self, timeout_s: float) -> None:
        """Return once the engine says that it is healthy, else raise."""
        await self.http.call("GET", "/health", None, timeout_s=timeout_s)

    async def is_paused(self) -> bool:
        return bool((await self.http.get("/is_paused", timeout_s=self.timeout_s))["is_paused"])

    async def state(self) -> CoreState:
        """Ask the core between two of its steps. UnreachableError: the core is gone."""
        answer: Any = await self._ask_core("/penstock/core", {}, self.timeout_s)
        if answer is not NO_CORE:
            return CoreState(**{name: answer[name] for name in _CORE_FIELDS if name in answer})
        paused = await self.is_paused()  # unlike `info`, it always asks the core
        info = await self.info()
        return CoreState(paused, info.weight_version, checksum=info.checksum or None)

    async def core_gone(self) -> None:
        """Return once the connection to the core breaks. Without one, never return."""
        while self._core is not None:
            try:
                await self._core.post("/penstock/core/gone", {}, timeout_s=GONE_S)
            except EngineHTTPError:
                break
            except DeadlineError:
                continue
            except PenstockError:
                return
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self.http.end()  # for good: its launcher forgets it at a restart, and a late call would open it again
        if self._core is not None:
            await self._core.end()

    # --- new weights -------------------------------------------------------------------------------------------------

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

    # --- the ways to core and server ---------------------------------------------------------------------------------

    async def at_core(
        self, path: str, body: Mapping[str, Any], timeout_s: float | None = None, *, otherwise: str | None = None
    ) -> Any:
        """Ask the core, else the API server at the same path or vLLM's `otherwise`."""
        answer = await self._ask_core(path, body, timeout_s or self.timeout_s)
        if answer is not NO_CORE:
            return answer
        sent = body if otherwise is None else None
        return await self.post(otherwise or path, sent, timeout_s=timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        """Call the API server."""
        return await self.http.post(path, body, timeout_s=timeout_s or self.timeout_s)

    async def _ask_core(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """Ask the core. Return `NO_CORE` if only the API server is reachable.

        A proxy or a mapped port may hide the core. UnreachableError: the core has answered before, so it has died.
        """
        core = self._core
        if core is None:
            return NO_CORE
        try:
            answer = await core.post(path, body, timeout_s=timeout_s)
        except (UnreachableError, ConnectTimeoutError) as error:  # the request was not sent
            if self._core_answered:
                raise
            if self._core is core:  # another call may have found it out already
                self._core, self._dropped = None, core.url if isinstance(error, ConnectTimeoutError) else None
            await core.close()
            return NO_CORE
        self._core_answered = True
        return answer

    async def _connect_core(self, port: int | None) -> None:
        """Use the core at `port` from now on, for calls that must not wait for tokens."""
        url = None if port is None else str(URL(self.url).with_port(port))
        if self._core is not None and self._core.url != url:
            await self._core.close()
            self._core, self._core_answered = None, False
        if url is not None and self._core is None and url != self._dropped:
            self._core = HttpTransport(url, api_key=self._key, name=self.name)


_CORE_FIELDS = [field.name for field in fields(CoreState)]
_INFO = TypeAdapter(EngineInfo)


def checked_info(**values: Any) -> EngineInfo:
    """Build the description of an engine. ValueError: a value is missing, of another type, or out of range."""
    try:
        return _INFO.validate_python(values)
    except ValidationError as error:
        raise ValueError("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())) from None
