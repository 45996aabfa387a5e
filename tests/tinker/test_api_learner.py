"""A learner that dies: what is lost fails with that reason, once, and never goes unsaid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import select, update
from test_api_futures import never
from tinker_rig import BASE, Rig, learner_at, parts, rig, until

from penstock.tinker import futures, service_state, training
from penstock.tinker.database import futures as table
from penstock.tinker.database import sessions
from penstock.tinker.futures import Futures

pytestmark = pytest.mark.usefixtures("shared_fleet")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "AGAIN_S", 0.02)


@asynccontextmanager
async def mortal(data: Path) -> AsyncIterator[tuple[Rig, AsyncExitStack]]:
    """A service, and the stack on which its learner runs: closing that is the learner's death."""
    async with parts(data) as found, AsyncExitStack() as life:
        path = data / "mortal.sock"
        await life.enter_async_context(learner_at(path, found.learner))
        async with found.process(learner=path) as service:
            yield service, life


async def reborn(service: Rig, life: AsyncExitStack, *half_done: str) -> None:
    """Start another learner, with each model as it was last saved, and with models that were made and never saved."""
    learner = service.learner
    learner.models, learner.hold = dict(learner.saved) | dict.fromkeys(half_done, 0), None
    learner.incarnation += 1
    await life.enter_async_context(learner_at(service.options.learner, learner))


async def lost_step(service: Rig, life: AsyncExitStack) -> tuple[str, str]:
    """A model of which one step is lost with its learner, and the future of the next one."""
    model = await service.model()
    await service.done("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    await service.result(await service.step(model, 2))
    await life.aclose()
    later = await service.step(model, 3)
    await reborn(service, life)
    return model, later


async def test_a_model_goes_on_from_its_last_save_after_its_client_was_told(tmp_path: Path) -> None:
    async with mortal(tmp_path) as (service, life):
        model, other, idle = [await service.model() for _ in range(3)]
        for each in (model, other):
            await service.result(await service.step(each, 1))
            await service.done("save_weights", {"model_id": each, "seq_id": 2, "path": "a"})
        for each in (model, idle):
            await service.result(await service.step(each, 3))
        service.learner.hold = asyncio.Event()
        cut, queued = await service.step(model, 4), await service.step(model, 5)
        await until(lambda: service.learner.waiting)
        await life.aclose()
        service.learner.last.clear()
        told = await service.result(cut)
        assert "the learner" in told["error"]
        assert "last save" in told["error"]
        assert told["category"] == "server"
        await reborn(service, life)
        assert "last save" in (await service.result(queued))["error"], "it was sent before the client knew"
        assert "metrics" in await service.result(await service.step(model, 6))
        assert service.learner.models[model] == 2, "one step saved, one made since"
        assert "metrics" in await service.result(await service.step(other, 3)), "it lost nothing"
        assert "never been saved" in (await service.result(await service.step(idle, 4)))["error"]
        assert "is not there" in (await service.result(await service.step(idle, 5)))["error"]
        runs = (await service.get("training_runs"))["training_runs"]
        assert {run["training_run_id"]: run["corrupted"] for run in runs} == {model: False, other: False, idle: False}


async def test_a_death_that_no_operation_saw_is_told_too(tmp_path: Path) -> None:
    async with mortal(tmp_path) as (service, life):
        model, later = await lost_step(service, life)
        failed = await service.result(later)
        assert "at step 0; its state at step 1 is lost" in failed["error"]
        assert "metrics" in await service.result(await service.step(model, 4))
        assert service.learner.models[model] == 1


async def test_a_failure_that_its_client_has_fetched_is_not_told_again_when_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mortal(tmp_path) as (service, life):
        model, later = await lost_step(service, life)
        assert "is lost" in (await service.result(later))["error"]
        for name in ("KEEP_RETRIEVED_S", "FORGET_S"):
            monkeypatch.setattr(futures, name, -10.0)
        fetched = select(table.c.retrieved).where(table.c.id == later["request_id"])
        async with asyncio.timeout(60.0):
            while await service.database.run(lambda c: c.execute(fetched).scalar()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # it is written behind the answer
        await Futures(service.database, "test", never).prune()
        assert await service.database.run(lambda c: c.execute(fetched).first()) is None
        assert "metrics" in await service.result(await service.step(model, 4))


async def test_a_model_whose_creation_failed_with_the_learner_does_not_stay_in_the_next_one(tmp_path: Path) -> None:
    async with mortal(tmp_path) as (service, life):
        kept = await service.model()
        await service.done("save_weights", {"model_id": kept, "seq_id": 1, "path": "a"})
        session, learner = kept.partition(":")[0], service.learner
        learner.hold = asyncio.Event()
        create = {"session_id": session, "model_seq_id": 1, "base_model": BASE, "lora_config": {"rank": 4}}
        future = await service.post("create_model", create)
        await until(lambda: learner.waiting)
        await life.aclose()
        assert "error" in await service.result(future)
        await reborn(service, life, f"{session}:train:1")  # it was there before the answer
        assert "metrics" in await service.result(await service.step(kept, 2))
        assert learner.models.keys() == {kept}


async def test_a_saved_model_that_the_database_does_not_know_stays_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with parts(tmp_path) as found:
        async with found.process() as service:
            saved, never = await service.model(), await service.model()
            await service.done("save_weights", {"model_id": saved, "seq_id": 1, "path": "a"})
        async with found.process(database=f"sqlite:///{tmp_path}/another.db") as service:
            new = await service.model()
            assert found.learner.models.keys() == {saved, new}
            assert f"the learner drops {never}, which was never saved" in caplog.text
            assert f"holds saved models that the database does not know: {saved}" in caplog.text
        async with found.process() as service:
            assert "metrics" in await service.result(await service.step(saved, 2))


async def test_a_session_that_ends_takes_its_models_from_the_learner(tmp_path: Path) -> None:
    async with parts(tmp_path) as found, found.process() as service:
        model = await service.model()
        session = model.partition(":")[0]
        await service.post("session_heartbeat", {"session_id": session})
        await service.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204)
        await until(lambda: model not in service.learner.models)
        await service.post("session_heartbeat", {"session_id": session}, status=410)
        assert "has ended" in (await service.result(await service.step(model, 1)))["error"]


async def test_no_creation_outlives_its_session(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        old = await service.model()
        saved = await service.done("save_weights", {"model_id": old, "seq_id": 1, "path": "a"})
        session = await service.session()
        load = {"path": saved["path"], "optimizer": True, "session_id": session, "model_seq_id": 1}
        service.learner.hold = asyncio.Event()
        create = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
        future, loaded = await service.post("create_model", create), await service.post("load_weights", load)
        await service.post(f"sessions/{session}/finish", {}, status=204)
        service.learner.hold.set()
        await service.result(future), await service.result(loaded)
        await until(lambda: service.learner.models.keys() == {old})
        again = {"path": saved["path"], "optimizer": True, "model_id": f"{session}:train:0", "seq_id": 9}
        assert "session has ended" in (await service.done("load_weights", again))["error"]
        assert service.learner.models.keys() == {old}


async def test_the_sweep_drops_what_an_ended_session_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_state, "SWEEP_S", 0.05)
    async with rig(tmp_path) as service:
        model, other = await service.model(), await service.model()
        change = update(sessions).where(sessions.c.id == model.partition(":")[0]).values(finished="it was killed")
        await service.database.run(lambda c: c.execute(change))
        await until(lambda: service.learner.models.keys() == {other})


async def test_a_creation_that_fails_is_no_training_run(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        model = await service.model()
        session = model.partition(":")[0]
        create = {"session_id": session, "model_seq_id": 1, "base_model": BASE}  # without lora_config
        load = {"session_id": session, "model_seq_id": 2, "optimizer": True, "path": f"tinker://{model}/weights/none"}
        for path, body in (("create_model", create), ("load_weights", load)):
            assert "error" in await service.done(path, body)
        found = await service.get("training_runs")
        assert [run["training_run_id"] for run in found["training_runs"]] == [model]
        assert (await service.get(f"sessions/{session}"))["training_run_ids"] == [model]


async def test_a_model_that_was_never_saved_is_said_to_start_anew(tmp_path: Path) -> None:
    async with mortal(tmp_path) as (service, life):
        model = await service.model()
        await service.result(await service.step(model, 1))
        await life.aclose()
        later = await service.step(model, 2)
        await reborn(service, life, model)
        failed = await service.result(later)
        assert (
            "was never saved by save_state: it starts anew, at step 0; its state at step 1 is lost" in failed["error"]
        )
