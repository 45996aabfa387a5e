"""Futures: once each, in order, for their tenant alone, also through restarts and over several processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import zstandard
from sqlalchemy import func, select
from tinker_rig import KEY, OTHER_KEY, Rig, fleet_of, parts, rig, until

from patience import WAIT_S, asked
from penstock.errors import ConfigError, StateError, UserError
from penstock.tinker import futures, requests
from penstock.tinker.api import serving
from penstock.tinker.database import Database, models, usage
from penstock.tinker.database import futures as table
from penstock.tinker.futures import Futures, Operation, Outcome
from penstock.tinker.schema import check_fields, pb
from penstock.tinker.sessions import Sessions
from penstock.tinker.tenants import Tenant, Tenants, read_keys

pytestmark = pytest.mark.usefixtures("shared_fleet")


async def never(_: Operation) -> Outcome:
    await asyncio.Event().wait()
    raise AssertionError


async def test_repeated_requests_run_once_and_operations_keep_their_order(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        model = await service.model()
        service.learner.hold = asyncio.Event()
        first = await service.step(model, 2)  # chunks of a batch arrive out of the order of their numbers
        again = [await service.step(model, 2) for _ in range(3)]
        second = await service.step(model, 0)
        assert again == [first] * 3
        assert await service.step(model, 0) == second
        service.learner.hold.set()
        await service.result(second)
        assert await service.result(first) == await service.result(first), "a result can be fetched twice"
        assert await service.step(model, 2) == first
        assert service.learner.done[1:] == [("optim_step", f"{model}:2"), ("optim_step", f"{model}:0")]
        assert service.learner.models[model] == 2


async def test_a_poll_is_held_and_woken_by_the_result(tmp_path: Path) -> None:
    async with rig(tmp_path, hold_s=1.0) as service:
        model = await service.model()
        service.learner.hold = asyncio.Event()
        future = await service.step(model, 1)
        began = time.monotonic()
        pending = await service.post("retrieve_future", future)
        assert pending == {"type": "try_again", "request_id": future["request_id"], "queue_state": "active"}
        assert time.monotonic() - began >= 0.9
    (folder := tmp_path / "woken").mkdir()
    async with rig(folder, hold_s=10 * WAIT_S) as service:
        model = await service.model()
        service.learner.hold = asyncio.Event()
        future = await service.step(model, 1)
        waiting = asyncio.create_task(service.post("retrieve_future", future))
        await asyncio.sleep(0.05)
        service.learner.hold.set()
        assert "metrics" in await asyncio.wait_for(waiting, WAIT_S)
        await service.post("retrieve_future", {"request_id": "none"}, status=410)


async def test_another_tenants_ids_do_not_exist(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        model = await service.model()
        session = model.partition(":")[0]
        sampler = await service.sampler(session)
        future = await service.step(model, 1)
        other = {"key": OTHER_KEY, "status": 404}
        for path, body in (
            ("get_info", {"model_id": model}),
            ("optim_step", {"model_id": model, "seq_id": 9}),
            ("save_weights", {"model_id": model, "seq_id": 9}),
            ("load_weights", {"model_id": model, "seq_id": 9, "path": "x", "optimizer": False}),
            ("create_model", {"session_id": session, "model_seq_id": 9, "base_model": "sorter"}),
            ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 9, "base_model": "sorter"}),
            ("asample", service.sample_body(sampler)),
            ("session_heartbeat", {"session_id": session}),
            (f"sessions/{session}/finish", {}),
        ):
            refused = await service.post(path, body, **other)
            assert "you have no" in refused["error"], path
        for path in (f"training_runs/{model}", f"training_runs/{model}/checkpoints", f"samplers/{sampler}"):
            await service.get(path, **other)
        await service.post("retrieve_future", future, key=OTHER_KEY, status=410)
        await service.post("cancel_future", future, key=OTHER_KEY, status=410)
        assert (await service.get("sessions", key=OTHER_KEY))["sessions"] == []
        for key in ("", "tml-wrong-key"):
            assert "TINKER_API_KEY" in (await service.post("create_session", {}, key=key, status=401))["error"]
        assert await service.result(future)
        assert service.learner.done[-1] == ("optim_step", f"{model}:1")


async def test_a_quota_counts_over_all_processes_and_in_bytes(tmp_path: Path) -> None:
    tenants = Tenants([Tenant("alice", KEY, max_bytes=4000), Tenant("robert", OTHER_KEY, max_queued=4)])
    async with rig(tmp_path, tenants=tenants) as service, service.second() as second:
        model, big = await service.model(OTHER_KEY), await service.model(KEY)
        too_large = await service.post("optim_step", {"model_id": big, "seq_id": 9, "more": "x" * 4000}, status=400)
        assert "and all of yours together may have 4000 (max_bytes)" in too_large["error"]
        service.learner.hold = asyncio.Event()
        body = {"model_id": model, "adam_params": {"learning_rate": 1.0}}
        queued = [
            await (service, second)[seq % 2].post("optim_step", body | {"seq_id": seq}, key=OTHER_KEY)
            for seq in range(1, 5)
        ]
        for process in (service, second):
            refused = await process.post("optim_step", body | {"seq_id": 5}, key=OTHER_KEY, status=429)
            assert "4 operations of yours are not finished" in refused["error"]
            assert await process.post("optim_step", body | {"seq_id": 4}, key=OTHER_KEY), "it is there already"
        large = body | {"model_id": big, "more": "x" * 2000}
        first = await service.post("optim_step", large | {"seq_id": 1})
        refused = await second.post("optim_step", large | {"seq_id": 2}, status=429)
        assert "you may have 4000" in refused["error"]
        service.learner.hold.set()
        assert "metrics" in await service.result(first)
        await second.post("optim_step", large | {"seq_id": 2})
        for future in queued:
            await service.result(future, key=OTHER_KEY)
        await service.post("optim_step", body | {"seq_id": 5}, key=OTHER_KEY)


async def test_sessions_and_models_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    tenants = Tenants([Tenant("alice", KEY, max_sessions=2, max_models=2)])
    async with rig(tmp_path, tenants=tenants) as service:
        one, two = [await service.session() for _ in range(2)]
        assert "2 open sessions" in (await service.post("create_session", {}, status=400))["error"]
        await service.post(f"sessions/{one}/finish", {}, status=204)
        await service.session()
        bodies = [
            {"session_id": two, "model_seq_id": i, "base_model": "sorter", "lora_config": {"rank": 4}} for i in range(3)
        ]
        url, headers = "/api/v1/create_model", {"X-API-Key": KEY}
        answers = await asyncio.gather(*(service.http.post(url, json=body, headers=headers) for body in bodies))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 400]
        assert "you have 2 models" in next(answer.json()["error"] for answer in answers if answer.status_code == 400)
        await service.post(f"sessions/{two}/finish", {}, status=204)
        model = await service.model()  # those of the ended session count no longer, though the learner may have them
        await until(lambda: list(service.learner.models) == [model])


async def test_what_cannot_run_is_a_failed_future_that_says_why(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        model = await service.model()
        session = model.partition(":")[0]
        sampler = await service.sampler(session)
        body = {"session_id": session, "model_seq_id": 1, "base_model": "gpt", "lora_config": {"rank": 4}}
        samples = [
            ({"sampling_params": {}}, "max_tokens is missing"),
            ({"num_samples": 0}, "from 1 to"),
            ({"prompt": {"chunks": []}}, "no token"),
            ({"prompt": {"chunks": [{"tokens": [10**9]}]}}, "outside the vocabulary"),
            ({"sampling_params": {"max_tokens": 4, "top_k": 2**64}}, "top_k: Input should be less than"),
            ({"sampling_params": {"max_tokens": 4, "stop": [2**64]}}, "stop.list"),
            ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "type 'image'"),
            ({"prompt_alt_tokens_k": 2}, "not supported"),
            ({"topk_sample_logprobs": 21}, "at most 20"),
            ({"sampling_params": {"max_tokens": 4, "top_p": 3}}, "top_p"),
            ({"sampling_params": {"max_tokens": 4, "stop": [None]}}, "sampling_params.stop"),
            ({"sampling_params": {"max_tokens": 5000}}, ""),
        ]
        for seq, (wrong, why) in enumerate(samples, 1):
            failed = await service.sample(sampler, seq, **wrong)
            assert failed["category"] == "user", wrong
            assert why in failed["error"]
        for path, more, why in (
            ("create_model", body, "trains sorter"),
            ("create_model", body | {"base_model": "sorter", "lora_config": None, "model_seq_id": 2}, "LoRA alone"),
            (
                "create_model",
                body | {"base_model": "sorter", "model_seq_id": 3, "optimizer_config": {"type": "x"}},
                "'x'",
            ),
            ("optim_step", {"model_id": model, "seq_id": 1}, "adam_params: Field required"),
            (
                "optim_step",
                {"model_id": model, "seq_id": 6, "adam_params": {"learning_rate": None}},
                "adam_params.learning_rate: Input should be a valid number (got None)",
            ),
            (
                "optim_step",
                {"model_id": model, "seq_id": 7, "adam_params": {"learning_rate": True}},
                "adam_params.learning_rate: Input should be a valid number (got True)",
            ),
            (
                "save_weights_for_sampler",
                {"model_id": model, "sampling_session_seq_id": 1 << 64},
                "sampling_session_seq_id",
            ),
            ("save_weights", {"model_id": model, "seq_id": 2, "path": "../x"}, "a checkpoint's name"),
            ("save_weights", {"model_id": model, "seq_id": 3, "ttl_seconds": 1}, "ttl_seconds"),
            ("load_weights", {"model_id": model, "seq_id": 4, "path": "/etc/passwd", "optimizer": True}, "no path"),
            (
                "load_weights",
                {"model_id": model, "seq_id": 5, "path": f"tinker://{model}/weights/none", "optimizer": True},
                "no checkpoint",
            ),
        ):
            failed = await service.done(path, more)
            assert why in failed["error"], failed
        for path, bad, why in (
            ("create_session", [1], "body"),
            (
                "create_sampling_session",
                {"session_id": session, "sampling_session_seq_id": 1, "base_model": "x"},
                "sorter",
            ),
            ("asample", {"prompt": {}}, "needs sampling_session_id"),
            (
                "create_model",
                body | {"user_metadata": {"a": [1 << 70]}},
                "user_metadata: Value error, it cannot be kept",
            ),
            ("create_session", {"user_metadata": {"a": 1 << 70}}, "Integer exceeds 64-bit range"),
            ("optim_step", {"model_id": model, "seq_id": 1 << 64}, "seq_id: Input should be less than"),
            ("forward_backward", {"model_id": model}, "no ForwardBackwardRequest"),
            ("create_model", body | {"lora_config": {"rank": 4, "seed": 1 << 64}}, "lora_config.seed: Input should be"),
        ):
            assert why in (await service.post(path, bad, status=400))["error"]
        assert "docs/tinker.md" in (await service.post("copy_weights", {}, status=404))["error"]


def within(body: bytes, *numbers: int) -> bytes:
    """Make a body the field of a message, that the field of another one, and so on."""
    for number in reversed(numbers):
        size = len(body)
        body = bytes([number << 3 | 2, *(size >> shift & 127 | 128 for shift in (0, 7, 14)), size >> 21]) + body
    return body


PARTS = 300_000


@pytest.mark.parametrize(
    "many",
    [
        b"\x1a\x00" * PARTS,  # data
        within(b"\x0a\x00" * PARTS, 3),  # chunks of a datum
        within(b"\x0a\x00" * PARTS, 3, 2, 2, 2),  # within a sparse tensor
        within(b"\x01" * 2 * PARTS, 3, 2, 2, 4),  # the shape of a tensor
        b"\x7b\x7c" * PARTS,  # what no message has
        b"\x22\x01m" + b"\x1a\x00" * PARTS,  # behind a text that is no message
    ],
)
def test_a_small_body_of_many_fields_is_refused_before_it_is_parsed(many: bytes) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    for _ in range(1024):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(400)
        for name in ("target_tokens", "logprobs", "advantages", "weights"):
            datum.loss_fn_inputs[name].dense = bytes(400)
    check_fields(message.SerializeToString())
    with pytest.raises(UserError, match=r"more than 262144 protobuf fields, .* send fewer data"):
        check_fields(many)


@pytest.mark.parametrize("end", [b"\x1a\x05", b"\xff" * 700_000], ids=["cut off", "a number without end"])
def test_a_body_that_ends_too_early_is_refused_whatever_came_before(end: bytes) -> None:
    with pytest.raises(UserError, match="it is cut off"):
        check_fields(within(bytes(700_000), 9) + end)


async def test_a_large_body_is_parsed_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parse waits until another request was answered, which it never is on the loop."""
    parsing, answered = threading.Event(), threading.Event()

    def waits(body: bytes) -> None:
        parsing.set()
        assert answered.wait(60.0), "the loop answers nothing else"
        check_fields(body)

    monkeypatch.setattr("penstock.tinker.requests.check_fields", waits)
    async with rig(tmp_path) as service:
        model = await service.model()
        message = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="ppo")
        message.data.add().model_input.add().encoded_text.tokens = bytes(1 << 17)
        sent = asyncio.create_task(
            service.http.post(
                "/api/v1/forward_backward", content=message.SerializeToString(), headers={"X-API-Key": KEY}
            )
        )
        await until(parsing.is_set)
        await service.session()
        answered.set()
        assert (await sent).status_code == 200


async def test_runs_are_those_of_a_project(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        given = {"tags": [], "sdk_version": "0.38.0", "project_id": "mine"}
        session = (await service.post("create_session", given))["session_id"]
        model, other = await service.model(session=session), await service.model()

        async def listed(query: str) -> tuple[set[str], int]:
            found = await service.get(f"training_runs{query}")
            return {run["training_run_id"] for run in found["training_runs"]}, found["cursor"]["total_count"]

        assert await listed("?project_id=mine") == ({model}, 1)
        assert await listed("?project_id=nobodys") == (set(), 0)
        assert await listed("") == ({model, other}, 2)


async def test_bodies_may_be_packed_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tinker.requests.MOST_BODY", 1 << 16)
    async with rig(tmp_path) as service:
        model = await service.model()
        message = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy").SerializeToString()
        headers = {"X-API-Key": KEY, "Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}

        async def send(data: bytes, **more: str) -> int:
            url = "/api/v1/forward_backward"
            return (await service.http.post(url, content=data, headers=headers | more)).status_code

        pack = zstandard.ZstdCompressor().compress
        assert await send(pack(message)) == 200
        assert service.learner.bodies.get(f"{model}:1", message) == message
        assert await send(pack(bytes(1 << 20))) == 413
        assert await send(bytes(1 << 20)) == 413
        assert await send(b"no zstd") == 400
        assert await send(message, **{"Content-Encoding": "br"}) == 415
        body = service.sample_body(await service.sampler(model.partition(":")[0]))
        body["prompt"]["chunks"][0]["tokens"] = [5] * 40_000  # of a context of 512
        assert "MiB" in (await service.post("asample", body, status=413))["error"]
        wide = {"user_metadata": {"a": "x" * (1 << 20)}, "model_id": model}
        for path in ("create_session", "optim_step", "get_info"):  # such JSON is read while all others wait
            assert "1 MiB" in (await service.post(path, wide, status=413))["error"]


async def test_bodies_under_way_are_bounded_for_each_tenant_and_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MOST_OF_TENANT", 1 << 20)
    monkeypatch.setattr(requests, "MOST_OF_PROCESS", 3 << 19)
    budget = requests.BodyBudget()
    monkeypatch.setattr("penstock.tinker.api.BodyBudget", lambda: budget)
    large, packed = bytes(700_000), zstandard.ZstdCompressor().compress(bytes(4 << 20))
    async with rig(tmp_path) as service:

        async def send(data: Any, key: str = KEY, **more: str) -> int:
            url, headers = "/api/v1/forward_backward", {"X-API-Key": key, "Content-Type": "application/x-protobuf"}
            return (await service.http.post(url, content=data, headers=headers | more)).status_code

        async def slow(hold: asyncio.Event) -> AsyncIterator[bytes]:
            yield large
            await hold.wait()

        assert len(packed) < 1000
        assert await send(packed, **{"Content-Encoding": "zstd"}) == 429
        assert await send(large) == 400, "what was taken is given back"
        mine, theirs = asyncio.Event(), asyncio.Event()
        async with asyncio.timeout(WAIT_S):
            first = asyncio.create_task(send(slow(mine)))
            await until(lambda: budget._used["alice"] > 600_000)
            assert await send(large) == 429
            assert await send(large, OTHER_KEY) == 400
            second = asyncio.create_task(send(slow(theirs), OTHER_KEY))
            await until(lambda: budget._used["robert"] > 600_000)
            assert await send(bytes(400_000), OTHER_KEY) == 429, "robert may have as much, all together may not"
            await service.session()
            mine.set()
            theirs.set()
            assert [await first, await second] == [400, 400]
            assert await send(large) == 400


async def test_futures_outlive_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, retrieve = asyncio.Event(), Futures.retrieve

    async def holding(self: Futures, *given: Any) -> Outcome | None:
        held.set()
        return await retrieve(self, *given)

    async with parts(tmp_path, sim={"tokens_per_second": 20}) as found:
        async with found.process() as service:
            model = await service.model()
            sampler = await service.sampler(model.partition(":")[0])
            service.learner.hold = asyncio.Event()
            step, later = await service.step(model, 1), await service.step(model, 2)
            sample = await service.post("asample", service.sample_body(sampler))
            url, headers = f"{service.url}/api/v1/retrieve_future", {"X-API-Key": KEY}
            monkeypatch.setattr(Futures, "retrieve", holding)  # only now: the polls before have ended
            poll = asyncio.create_task(found.http.post(url, json=step, headers=headers))
            await asyncio.wait_for(held.wait(), WAIT_S)
        assert (await poll).json()["type"] == "try_again", "the end of the process answers the polls that it holds"
        found.learner.hold.set()
        async with found.process() as service:
            assert isinstance(await service.result(sample), bytes)
            assert "metrics" in await service.result(step)
            assert "metrics" in await service.result(later)
            assert [kind for kind, _ in found.learner.done] == ["create_model", "optim_step", "optim_step"]
            assert found.learner.models[model] == 2


async def test_a_model_goes_on_once_the_database_has_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [StateError("disk full")] * 2
    charge = futures.charge

    def full_at_first(*given: Any) -> None:
        if errors:
            raise errors.pop()
        charge(*given)

    async with parts(tmp_path) as found:
        async with found.process() as service:
            model = await service.model()
            monkeypatch.setattr(futures, "charge", full_at_first)
            monkeypatch.setattr(futures, "BEAT_S", 0.05)
            steps = [await service.step(model, seq) for seq in (1, 2)]
            assert all(["metrics" in await service.result(step) for step in steps])
            await until(lambda: len(found.learner.done) == 3)
        async with found.process() as service:
            assert all(["metrics" in await service.result(step) for step in steps])
        assert found.learner.done[1:] == [("optim_step", step["request_id"]) for step in steps], "each once"


async def test_a_model_goes_on_after_an_outcome_that_the_database_refuses_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = "BEFORE UPDATE ON futures WHEN NEW.result IS NOT NULL BEGIN SELECT RAISE(ABORT, 'too big'); END"
    async with parts(tmp_path) as found, found.process() as service:
        model = await service.model()
        await service.database.run(lambda c: c.exec_driver_sql(f"CREATE TRIGGER refuse {refuse}"))
        monkeypatch.setattr(futures, "BEAT_S", 0.01)
        monkeypatch.setattr(futures, "MOST_TRIES", 2)
        steps = [await service.step(model, seq) for seq in (1, 2)]
        of_model = select(models.c.steps).where(models.c.id == model)
        await asked(lambda: service.database.run(lambda c: c.execute(of_model).scalar()), lambda steps: steps == 2)
        refused = "optim_step was done, but its result cannot be kept: the service's database refused: too big"
        assert [await service.result(step) for step in steps] == [{"error": refused, "category": "server"}] * 2


async def test_what_the_learner_refuses_is_told_in_its_own_words(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        body = pb.ForwardBackwardRequest(model_id=await service.model(), seq_id=1, loss_fn="none").SerializeToString()
        url, headers = "/api/v1/forward_backward", {"X-API-Key": KEY}
        future = (await service.http.post(url, content=body, headers=headers)).json()
        told = {"error": "the learner: loss 'none' is not known", "category": "user"}
        assert await service.result(future) == told


@pytest.mark.parametrize("kind", ["optim_step", "save_weights"])
async def test_what_an_operation_changed_is_recorded_however_long_the_database_is_away(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parts(tmp_path) as found, found.process() as service:
        model = await service.model()
        monkeypatch.setattr(futures, "BEAT_S", 0.01)
        monkeypatch.setattr(futures, "MOST_TRIES", 2)
        run, tries = Database.run, list[None]()

        async def away(database: Database, work: Any) -> Any:
            if found.learner.done[1:] and len(tries) < 20:
                tries.append(None)
                raise StateError("the service's database is not there")
            return await run(database, work)

        monkeypatch.setattr(Database, "run", away)
        body = {"model_id": model, "seq_id": 1}
        begun = await (service.step(model, 1) if kind == "optim_step" else service.post("save_weights", body))
        await until(lambda: len(tries) == 20)
        result = await service.result(begun)
        assert "error" not in result
        if kind == "optim_step":
            steps = select(models.c.steps).where(models.c.id == model)
            await asked(lambda: service.database.run(lambda c: c.execute(steps).scalar()), lambda steps: steps == 1)
        else:
            load = {"model_id": model, "seq_id": 2, "path": result["path"], "optimizer": True}
            assert "error" not in await service.done("load_weights", load)


async def test_a_failure_whose_error_cannot_be_kept_is_not_called_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = "BEFORE UPDATE ON futures WHEN NEW.error LIKE '%not known' BEGIN SELECT RAISE(ABORT, 'no such text'); END"
    async with rig(tmp_path) as service:
        model = await service.model()
        await service.database.run(lambda c: c.exec_driver_sql(f"CREATE TRIGGER refuse {refuse}"))
        monkeypatch.setattr(futures, "BEAT_S", 0.01)
        monkeypatch.setattr(futures, "MOST_TRIES", 2)
        body = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="none").SerializeToString()
        url, headers = "/api/v1/forward_backward", {"X-API-Key": KEY}
        future = (await service.http.post(url, content=body, headers=headers)).json()
        state = select(table.c.state).where(table.c.id == future["request_id"])
        await asked(lambda: service.database.run(lambda c: c.execute(state).scalar()), lambda now: now == "failed")
        refused = "forward_backward failed, and its error cannot be kept: the service's database refused: no such text"
        assert await service.result(future) == {"error": refused, "category": "server"}


async def test_operations_of_two_processes_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "BEAT_S", 0.05)
    async with parts(tmp_path) as found, found.process() as main, found.second() as second:
        model = await main.model()
        await main.result(await second.step(model, 0))  # now it follows the second process
        monkeypatch.setattr(futures, "FOLLOW_S", 1.0)
        await asyncio.sleep(0.2)
        steps = [await (second, main)[seq % 2].step(model, 10 - seq) for seq in range(2, 6)]
        for step in steps:
            await main.result(step)
        assert found.learner.done[2:] == [("optim_step", step["request_id"]) for step in steps]


async def test_a_second_process_that_is_new_keeps_the_order_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "BEAT_S", 3600.0)  # the main process does not look around
    async with parts(tmp_path) as found, found.process() as main, found.second() as second:
        model = await main.model()
        steps = [await process.step(model, 10 - seq) for seq, process in enumerate((second, main))]
        await main.result(steps[1])
        assert found.learner.done[1:] == [("optim_step", step["request_id"]) for step in steps]


async def test_a_second_process_serves_the_same_futures_and_samples(tmp_path: Path) -> None:
    async with rig(tmp_path) as service, service.second() as second:
        model = await second.model()
        sampler = await second.sampler(model.partition(":")[0])
        assert len((await second.sample(sampler)).sequences) == 1
        service.learner.hold = asyncio.Event()
        step = await second.step(model, 1)
        polls = [asyncio.create_task(process.result(step)) for process in (service, second)]
        await asyncio.sleep(0.3)
        service.learner.hold.set()
        assert await polls[0] == await polls[1] == {"metrics": {"grad_norm:mean": 1e-3}}


async def test_polls_for_another_processs_futures_share_their_reads(tmp_path: Path) -> None:
    databases = [Database(f"sqlite:///{tmp_path / 'futures.db'}") for _ in range(2)]
    one, other = [
        Futures(database, name, never, hold_s=2.0) for database, name in zip(databases, ("one", "other"), strict=True)
    ]
    operations = [Operation(f"model:{number}", "alice", "forward", "model", b"{}") for number in range(100)]
    reads, run = 0, databases[1].run

    async def counted(work: Any) -> Any:
        nonlocal reads
        reads += 1
        return await run(work)

    databases[1].run = counted  # type: ignore[method-assign]
    await one.open()
    await other.open()
    await asyncio.gather(*(one.accept(operation) for operation in operations))
    polls = [asyncio.create_task(other.retrieve("alice", operation.id)) for operation in operations]
    await one.finish(operations[0], Outcome(b"done"))
    found = await asyncio.gather(*polls)
    assert found[0] == Outcome(b"done")
    assert found[1:] == [None] * 99
    assert reads < 1000, "two of each poll, and those that all share; each for itself would make 20"
    for each in (one, other, *databases):
        await each.close()


async def test_the_database_names_the_engines_and_no_key(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        known: dict[str, Any] = {}
        while "engine_urls" not in known:
            known = await Sessions(service.database).fact("fleet")
        assert known["proxy_url"] == service.fleet.url
        assert sorted(known["engine_urls"].values()) == sorted(engine.url for engine in service.engines)
        assert set(known) == {"proxy_url", "engine_urls", "adapters"}
        assert all(type(version) is int for version in known["adapters"].values())


async def test_samples_of_a_process_that_died_are_taken_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "DEAD_S", 0.5)
    monkeypatch.setattr(futures, "BEAT_S", 0.2)
    async with rig(tmp_path, sim={"tokens_per_second": 20}) as service:
        async with service.second() as second:
            sampler = await service.sampler(await service.session())
            future = await second.post("asample", second.sample_body(sampler))
        assert isinstance(await service.result(future), bytes)


async def test_without_engines_a_sample_fails_with_the_reason(tmp_path: Path) -> None:
    async with parts(tmp_path) as found, found.process(fleet=None) as service:
        failed = await service.sample(await service.sampler(await service.session()))
        assert "no process on its database has named a fleet" in failed["error"]


async def test_another_fleet_that_the_database_names_takes_over(tmp_path: Path) -> None:
    async with AsyncExitStack() as first:
        gone, _ = await first.enter_async_context(fleet_of())
        async with rig(tmp_path, fleet=gone.url) as service:
            sampler = await service.sampler(await service.session())
            assert len((await service.sample(sampler, 1)).sequences) == 1
            await first.aclose()
            await Sessions(service.database).publish("fleet", {"proxy_url": service.fleet.url})
            assert len((await service.sample(sampler, 2)).sequences) == 1


async def test_an_abandoned_sample_is_cancelled(tmp_path: Path) -> None:
    async with rig(tmp_path, sim={"tokens_per_second": 1}) as service:
        sampler = await service.sampler(await service.session())
        future = await service.post("asample", service.sample_body(sampler))
        (engine,) = service.engines
        await until(lambda: list(engine.engine.scheduler))
        await service.post("cancel_future", future, status=204)
        assert "cancelled" in (await service.result(future))["error"]
        await until(lambda: not list(engine.engine.scheduler))
        model = await service.model()
        step = await service.step(model, 1)
        assert "samples alone" in (await service.post("cancel_future", step, status=400))["error"]


async def test_results_are_dropped_after_they_were_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(tmp_path) as service:
        model = await service.model()
        step = await service.step(model, 1)
        await service.result(step)
        monkeypatch.setattr(futures, "KEEP_RETRIEVED_S", -1.0)
        async with service.second():  # opens the tables of the same file
            pass
        await service.session()  # a write, with which it is noted that the result was fetched
        await prune(service)
        await service.post("retrieve_future", step, status=410)
        assert await service.step(model, 1) == step
        assert service.learner.models[model] == 1, "a request that comes late does not run again"


async def test_dropped_results_leave_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    kept = Futures(database, "other", never)
    monkeypatch.setattr(futures, "KEEP_S", -1.0)
    monkeypatch.setattr(futures, "FORGET_S", -1.0)
    for i in range(3):
        operation = Operation(f"{i}", "alice", "sample", "a:sample:0", bytes(1 << 16))
        await kept.accept(operation)
        await kept.finish(operation, Outcome(bytes(1 << 16)))
    await kept.prune()
    assert await database.run(lambda c: c.execute(select(usage.c.queued, usage.c.bytes)).one()) == (0, 0)
    assert await database.run(lambda c: c.execute(select(func.count()).select_from(table)).scalar()) == 0
    await database.close()


async def test_results_of_an_ended_session_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(tmp_path) as service:
        model, other = await service.model(), await service.model()
        steps = [await service.step(each, 1) for each in (model, other)]
        for each in (model, other):
            await service.result(await service.step(each, 2))
        await service.post(f"sessions/{model.partition(':')[0]}/finish", {}, status=204)
        monkeypatch.setattr(futures, "KEEP_RETRIEVED_S", 0.0)
        await prune(service)
        await service.post("retrieve_future", steps[0], status=410)
        assert "metrics" in await service.result(steps[1])


async def prune(service: Rig) -> None:
    await Futures(service.database, "test", never).prune()


async def test_a_service_that_any_key_opens_stays_on_this_machine(tmp_path: Path) -> None:
    async with parts(tmp_path) as found:
        options = found.options
        with pytest.raises(ConfigError, match="--keys"):
            async with serving(found.options.__class__(tmp_path, options.database, read_keys(None)), host="0.0.0.0"):
                pass
        async with found.process(tenants=read_keys(None)) as service:
            answer = await service.http.post(
                "/api/v1/create_session", json={}, headers={"X-API-Key": "tml-any", "Origin": "http://evil"}
            )
            assert answer.status_code == 403
