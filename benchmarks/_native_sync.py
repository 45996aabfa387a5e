"""vLLM 0.26's own weight transfer, driven as its documentation does: five calls to the API server."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import requests
from _engine_key import bearer

Tensors = Sequence[tuple[str, Any]]
DEADLINE_S = 120.0
PACKED_BYTES = 2 * 2**30
"""Larger than the largest tensor, which the default of 1 GiB is not."""


class Native:
    """One or more engines, updated together, the calls of each phase at once."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        self._pool = ThreadPoolExecutor(len(self._urls))

    def _all(self, path: str, body: Any = None) -> None:
        def call(url: str) -> None:
            requests.post(url + path, json=body, headers=bearer(), timeout=DEADLINE_S).raise_for_status()

        list(self._pool.map(call, self._urls))

    def _round(self, send: Callable[[], None], *, clear_cache: bool) -> dict[str, float]:
        """Seconds of each phase, pause to resume."""
        seconds: dict[str, float] = {}
        began = time.perf_counter()
        for phase, act in (
            ("pause", lambda: self._all(f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}")),
            ("start", lambda: self._all("/start_weight_update")),
            ("update", send),
            ("finish", lambda: self._all("/finish_weight_update", {})),
            ("resume", lambda: self._all("/resume")),
        ):
            begin = time.perf_counter()
            act()
            seconds[phase] = time.perf_counter() - begin
        seconds["round"] = time.perf_counter() - began
        seconds["start_to_finish"] = seconds["start"] + seconds["update"] + seconds["finish"]
        return seconds


class NativeNccl(Native):
    """Packed NCCL broadcast."""

    def __init__(self, urls: Sequence[str], port: int, ranks_of_one: int = 1) -> None:
        super().__init__(urls)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine  # noqa: PLC0415

        self._engine: Any = NCCLWeightTransferEngine  # its sending half is not in 0.32: this runs on 0.26
        world = 1 + len(urls) * ranks_of_one
        at = {"master_address": "127.0.0.1", "master_port": port, "world_size": world}

        def join(place: int) -> None:
            info = {**at, "rank_offset": 1 + place * ranks_of_one}
            url = urls[place] + "/init_weight_transfer_engine"
            requests.post(url, json={"init_info": info}, headers=bearer(), timeout=DEADLINE_S).raise_for_status()

        joining = [threading.Thread(target=join, args=(place,)) for place in range(len(urls))]
        for thread in joining:
            thread.start()
        self._group = self._engine.trainer_init(at)
        for thread in joining:
            thread.join(DEADLINE_S)

    def update(self, tensors: Tensors, clear_cache: bool = True) -> dict[str, float]:  # noqa: FBT001, FBT002
        """One round."""
        import torch  # noqa: PLC0415

        info = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "packed": True,
        }

        def send() -> None:
            receiving = threading.Thread(target=self._all, args=("/update_weights", {"update_info": info}))
            receiving.start()
            self._engine.trainer_send_weights(iter(tensors), {"group": self._group, "packed": True})
            torch.cuda.synchronize()
            receiving.join(DEADLINE_S)

        return self._round(send, clear_cache=clear_cache)


class NativeIpc(Native):
    """CUDA IPC, unpacked, its faster form; the engine needs VLLM_ALLOW_INSECURE_SERIALIZATION=1."""

    def update(self, tensors: Tensors, clear_cache: bool = True) -> dict[str, float]:  # noqa: FBT001, FBT002
        """One round."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine  # noqa: PLC0415

        sender: Any = IPCWeightTransferEngine
        (url,) = self._urls
        # vLLM's sender knows no key.
        with patch("requests.post", functools.partial(requests.post, headers=bearer())):
            return self._round(
                lambda: sender.trainer_send_weights(iter(tensors), {"send_mode": "http", "url": url}),
                clear_cache=clear_cache,
            )
