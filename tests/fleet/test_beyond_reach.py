"""Engines that a caller of their router is not to ask: no key of the caller's goes there."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from canned import answer, canned
from penstock import Fleet
from penstock.cli.status import status
from penstock.errors import EngineDeadError
from penstock.router.membership import EngineEntry, Membership
from penstock.router_settings import RouterConfig
from sim_fleets import router_here

ELSEWHERE = "router.test"
THERE = "as the user who owns the fleet, on the router's machine"


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name, which may be any machine's, for this one."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        return real("127.0.0.1" if host == ELSEWHERE else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


CONFIG = RouterConfig(allowed_hosts=ELSEWHERE, engine_metrics_interval_s=3600.0)


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(("host", "engine_key"), [(ELSEWHERE, "secret"), (ELSEWHERE, "own"), ("127.0.0.1", "own")])
async def test_the_callers_key_goes_to_no_engine_that_it_is_not_for(
    host: str, engine_key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with canned(answer(b"")) as thief, router_here(CONFIG, api_key="secret", admin_key="own") as router:
        entry = EngineEntry("e0", thief.url, weight_version=7, api_key=engine_key)
        router.dispatcher.set_membership(Membership(0, (entry,)))
        address = router.url.replace("127.0.0.1", host)
        await asyncio.to_thread(status, address, api_key="secret", as_json=False)
        shown = capsys.readouterr().out
        with pytest.raises(EngineDeadError, match=rf"call Fleet.connect {THERE}.* OpenAI client"):
            await Fleet.connect(address, api_key="secret")
        assert not [head for head in thief.heads if b"aiohttp" in head], "none but the router asks"
    [line] = [line for line in shown.splitlines() if thief.url.removeprefix("http://") in line]
    assert line.split()[:3] == ["e0", "serving", "7"], shown
