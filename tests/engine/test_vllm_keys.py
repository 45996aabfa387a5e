"""Who controls a real vLLM server that a fleet has launched: the holder of its key, and no web page."""

from __future__ import annotations

import aiohttp
import pytest
from yarl import URL

from penstock.guard import DATA_PATHS, OPEN_PATHS
from penstock.router.unserved import CONTROL_PATHS

pytestmark = pytest.mark.vllm

STEPS = ["prepare", "apply", "load", "commit", "group", "label"]
OURS = ["info", "pause", "resume", "core", *(f"weights/{step}" for step in STEPS)]
ROUTES = sorted({*(path.decode() for path in CONTROL_PATHS), *(f"/penstock/{name}" for name in OURS), "/server_info"})
ODD = ["/pause%0a", "/collective_rpc%0a", "/%70ause", "//pause", "/pause/", "/PAUSE", "/penstock/../pause"]
EVIL = {"Origin": "http://evil", "Content-Type": "text/plain"}
REBOUND = {"Host": "evil.example"}


async def statuses(url: str, paths: list[str], headers: dict[str, str]) -> dict[str, int]:
    """What each path answers to a plain POST; a raw target, which no client library mends."""
    found: dict[str, int] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:
        for path in paths:
            target = URL(url + path, encoded=True)
            async with session.post(target, data=b"{}", headers=headers) as answer:
                found[path] = answer.status
    return found


async def core_url(live) -> str:
    await live.engine.control.info()
    assert live.engine.control._core is not None
    return live.engine.control._core.url


async def test_without_the_key_nothing_is_done_on_either_port(live) -> None:
    (before,) = await live.engine.sample([5, 6, 7], 1, {"max_tokens": 4, "ignore_eos": True})
    version = live.engine.weight_version
    for url, paths in (
        (live.process.url, [*ROUTES, *ODD, *sorted(DATA_PATHS - OPEN_PATHS)]),
        (await core_url(live), [*(path for path in ROUTES if path.startswith("/penstock/")), "/"]),
    ):
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": f"Basic {live.key}"}):
            answers = await statuses(url, paths, headers)
            assert {path: status for path, status in answers.items() if status != 401} == {}, url
    info = await live.engine.control.info()
    assert (info.paused, info.weight_version) == (False, version)
    assert not await live.engine.control.is_paused()
    (after,) = await live.engine.sample([5, 6, 7], 1, {"max_tokens": 4, "ignore_eos": True})
    assert after.versions() == before.versions()


@pytest.mark.parametrize("page", [EVIL, REBOUND], ids=["Origin", "Host"])
async def test_a_web_page_is_refused_with_the_key_too(live, page: dict[str, str]) -> None:
    core = await core_url(live)
    for key in ({}, {"Authorization": f"Bearer {live.key}"}):
        for url, paths in ((live.process.url, [*ROUTES, *ODD]), (core, ["/penstock/pause", "/penstock/core"])):
            answers = await statuses(url, paths, {**page, **key})
            assert {path: status for path, status in answers.items() if status != 403} == {}, url
    assert not await live.engine.control.is_paused()
    body = {"prompt": [5, 6], "max_tokens": 1}
    async with aiohttp.ClientSession(live.process.url) as session:
        headers = {"Authorization": f"Bearer {live.key}", **page, "Content-Type": "application/json"}
        async with session.post("/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, "a page with the key may ask for completions"
