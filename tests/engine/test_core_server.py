"""The HTTP that brings an update to the engine core, past the API server."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import aiohttp
import pytest

from penstock.engine.vllm_plugin.core_server import CoreServer
from penstock.errors import TransferError, WeightsError


@pytest.fixture
def server():
    def route(body: Any) -> Future[Any]:
        done: Future[Any] = Future()
        match body["what"]:
            case "torn":
                done.set_exception(TransferError("half of it"))
            case "refused":
                done.set_exception(WeightsError("they do not fit"))
            case "unforeseen":
                done.set_exception(KeyError("x"))
            case "slow":
                threading.Timer(0.1, done.set_result, ({"late": True},)).start()
            case _:
                done.set_result({"ok": True})
        return done

    return f"http://127.0.0.1:{CoreServer({'/do': route}, ['secret']).port}"


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "answer"),
    [
        ("/do", {"what": "x"}, "secret", 200, {"ok": True}),
        ("/do", {"what": "slow"}, "secret", 200, {"late": True}),
        ("/do", {"what": "torn"}, "secret", 409, {"error": "half of it", "torn": True}),
        ("/do", {}, "secret", 400, {"error": "malformed body: KeyError('what')"}),
        ("/do", {"what": "x"}, "wrong", 401, {"error": "Unauthorized"}),
        ("/no", {}, "secret", 404, {"error": "no such route: POST /no"}),
        ("/do", {"what": "refused"}, "secret", 400, {"error": "they do not fit"}),
        ("/do", {"what": "unforeseen"}, "secret", 500, {"error": "KeyError('x')"}),
        ("/do", {"what": "x" * 10 * 2**20}, "secret", 200, {"ok": True}),
        ("/do", {"what": "x" * 64 * 2**20}, "secret", 400, {"error": "the body is larger than 67108864 bytes"}),
        ("/do", {"what": "x" * 2**20}, "wrong", 401, {"error": "Unauthorized"}),
    ],
)
async def test_the_server_in_the_core_answers(server, path, body, key, status, answer):
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(server + path, json=body) as response,
    ):
        assert (response.status, await response.json()) == (status, answer)
