"""The service as a command: what a kill leaves, and what is there again when it is started on the same folder."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from sdk_rig import MODEL, call, client_of, close_clients

import tinker
from penstock import Fleet
from penstock.tinker import sampling
from penstock.tinker.api import serving
from penstock.tinker.database import Database
from penstock.tinker.service_state import Options
from penstock.tinker.sessions import Sessions
from penstock.tinker.tenants import read_keys
from tinker import types

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

START_S = 600.0
"""Long, since it loads torch twice on a machine that may be busy."""


@asynccontextmanager
async def command(data: Path, *more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`penstock tinker` over a simulated engine, and its URL."""
    arguments = ["engine.profile=sim", "max_model_len=512", "served_model_name=sorter", "train.threads=1", *more]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", "tinker", str(MODEL), *arguments, "--data", str(data), "--port", "0",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            while (
                found := re.search(r"ready: .* at (\S+)", line := (await process.stdout.readline()).decode())
            ) is None:
                assert line, "it ended"
        yield process, found[1]
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.wait()


def descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


async def ended(pid: int) -> None:
    """Return when a process that is not our child has ended."""
    with suppress(ProcessLookupError):
        fd, done = os.pidfd_open(pid), asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, done.set)
        await done.wait()
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


async def test_a_service_that_is_started_again_has_what_was_saved(tmp_path: Path):
    tokens = types.ModelInput.from_ints([5, 6, 7])
    datum = types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": [6, 7, 8]})

    def loss_of(client: tinker.TrainingClient) -> float:
        return client.forward([datum], "cross_entropy").result().metrics["loss:sum"]

    def first(url: str) -> tuple[str, str, float]:
        client = client_of(url)
        training = client.create_lora_training_client("sorter", rank=4).result()
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        saved, sampler = training.save_state("a"), training.save_weights_for_sampler("b")
        return saved.result().path, sampler.result().path, loss_of(training)

    def second(url: str, saved: str, sampler: str, loss: float) -> None:
        client = client_of(url)
        training = client.create_training_client_from_state_with_optimizer(saved).result()
        assert loss_of(training) == pytest.approx(loss, rel=1e-4)
        sampling = client.create_sampling_client(model_path=sampler).result()
        (found,) = sampling.sample(tokens, 1, types.SamplingParams(max_tokens=4, stop=[])).result().sequences
        assert len(found.tokens) == 4

    async with command(tmp_path / "data") as (_, url):
        kept = await call(lambda: first(url))
        await call(close_clients)
        with pytest.raises(AssertionError, match="it ended"):  # another service has the folder
            await command(tmp_path / "data").__aenter__()
    async with command(tmp_path / "data") as (_, url):
        await call(lambda: second(url, *kept))
        await call(close_clients)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
async def test_samples_in_flight_when_the_owner_ends_are_answered_by_the_next_start(
    by: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sampling, "CONNECT_S", START_S)  # a start takes long here; the code has a minute
    data, auth = tmp_path / "data", {"X-API-Key": "tml-of-a-test"}
    url = f"sqlite:///{data}/service.db"

    async def post(at: str, path: str, body: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=at, timeout=120.0) as http:
            answer = await http.post(f"/api/v1/{path}", json=body, headers=auth)
            assert answer.status_code == 200, answer.text
            return answer

    async def asked(at: str, sampler: str, seq: int) -> Any:
        prompt, params = {"chunks": [{"tokens": [5, 6, 7]}]}, {"max_tokens": 400, "stop": []}
        body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": params}
        return (await post(at, "asample", body)).json()

    async def answered(at: str, future: Any) -> None:
        async with asyncio.timeout(START_S):
            while True:
                answer = await post(at, "retrieve_future", {"request_id": future["request_id"]})
                if answer.headers["content-type"] != "application/json":
                    return
                assert answer.json().get("type") == "try_again", answer.json()

    async with AsyncExitStack() as stack:
        async with command(data, "engine.extra_args.tokens-per-second=0.5") as (owner, main):
            session = (await post(main, "create_session", {"tags": [], "sdk_version": "0.38.0"})).json()["session_id"]
            made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "sorter"}
            sampler = (await post(main, "create_sampling_session", made)).json()["sampling_session_id"]
            further = await stack.enter_async_context(
                serving(Options(data=data, database=url, tenants=read_keys(None), name="further", hold_s=5.0))
            )
            futures = [await asked(main, sampler, seq) for seq in range(8)]
            cut = await asked(further, sampler, 8)  # it has reached the engines too
            database = Database(url)
            async with Fleet.connect((await Sessions(database).fact("fleet"))["proxy_url"]) as fleet:
                async with asyncio.timeout(START_S):
                    while [e.stats.running for e in await fleet.engines() if e.stats] != [9]:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
            children = descendants(owner.pid)
            owner.send_signal(by)
            await asyncio.gather(*map(ended, children))
            await database.close()
        async with command(data) as (_, main):
            await asyncio.gather(*(answered(main, future) for future in futures))
            await answered(further, cut)
            await answered(further, await asked(further, sampler, 9))
