"""The loop that blocking calls run on: closed, it keeps nobody waiting, and waits for what has to end."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.errors import StateError
from penstock.facade import loop_thread
from penstock.facade.loop_thread import LoopThread

FOREVER_S = 600.0
ANSWER_S = 60.0


async def takes_its_cancellation(begun: threading.Event, may_end: threading.Event, ended: threading.Event) -> None:
    try:
        begun.set()
        await asyncio.sleep(FOREVER_S)
    finally:
        while not may_end.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        ended.set()


def test_a_call_under_way_when_it_closes_ends_with_an_error_of_ours() -> None:
    loop = LoopThread("test")
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(FOREVER_S)

    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(loop.run, work())]
        assert begun.wait(ANSWER_S)
        loop.close()
        for each in waiting:
            with pytest.raises(StateError, match="shut down"):
                each.result(ANSWER_S)


def test_a_call_that_comes_while_it_closes_is_refused() -> None:
    """It waited for an answer that no loop would bring."""
    loop = LoopThread("test")
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(loop.run, takes_its_cancellation(begun, may_end, ended))
        assert begun.wait(ANSWER_S)
        closing = pool.submit(loop.close)
        while not loop._closing:
            assert not closing.done()
        late = pool.submit(loop.run, asyncio.sleep(0))
        with pytest.raises(StateError, match="shut down"):
            late.result(ANSWER_S)
        assert not closing.done()
        may_end.set()
        closing.result(ANSWER_S)
        with pytest.raises(StateError, match="shut down"):
            first.result(ANSWER_S)


def test_a_call_that_cannot_be_cancelled_does_not_hold_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "STOP_S", 0.0)
    loop = LoopThread("test")
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    with ThreadPoolExecutor() as pool:
        call = pool.submit(loop.run, takes_its_cancellation(begun, may_end, ended))
        try:
            assert begun.wait(ANSWER_S)
            loop.close()
            with pytest.raises(StateError, match="shut down"):
                call.result(ANSWER_S)
        finally:
            may_end.set()
