"""Checkpoints: paths, times, publication, and folders that stay inside the data folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tinker_rig import OTHER_KEY, Rig, rig, until

from penstock.errors import StateError, UserError
from penstock.tinker import sessions, training
from penstock.tinker.checkpoints import TinkerPath
from penstock.tinker.database import checkpoints
from penstock.tinker.sessions import Sessions, UnknownError

pytestmark = pytest.mark.usefixtures("shared_fleet")


async def saved(service: Rig, model: str, seq: int, **more: Any) -> Any:
    return await service.done("save_weights", {"model_id": model, "seq_id": seq, **more})


async def test_checkpoints_are_listed_loaded_replaced_and_deleted(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        model = await service.model(lora_config={"rank": 4, "train_mlp": False})
        path = (await saved(service, model, 1, path="first", user_metadata={"epoch": "1"}))["path"]
        assert path == f"tinker://{model}/weights/first"
        assert "there already" in (await saved(service, model, 2, path="first"))["error"]
        await service.result(await service.step(model, 3))
        assert (await saved(service, model, 4, path="first", overwrite=True))["path"] == path
        folders = tmp_path / "checkpoints"
        await until(lambda: len(list(folders.glob("*/weights/*"))) == 1)
        (folder,) = folders.glob("*/weights/*")
        assert (folder / "steps").read_text() == "1", "the older one is gone, the newer one is whole"
        sampler = {"model_id": model, "seq_id": 5, "path": "drawn"}
        drawn = (await service.done("save_weights_for_sampler", sampler))["path"]
        (listed,) = (await service.get(f"training_runs/{model}/checkpoints"))["checkpoints"][1:]
        assert (listed["checkpoint_id"], listed["checkpoint_type"]) == ("weights/first", "training")
        everything = await service.get("checkpoints?limit=1")
        assert [found["tinker_path"] for found in everything["checkpoints"]] == [drawn]
        assert everything["cursor"] == {"offset": 0, "limit": 1, "total_count": 2}
        run = await service.get(f"training_runs/{model}")
        assert (run["lora_rank"], run["last_checkpoint"]["tinker_path"], run["model_owner"]) == (4, path, "alice")
        info = await service.post("weights_info", {"tinker_path": path})
        assert info == {
            "base_model": "sorter", "is_lora": True, "lora_rank": 4,
            "train_unembed": True, "train_mlp": False, "train_attn": True,
        }  # fmt: skip
        session = await service.session()
        load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        loaded = await service.done("load_weights", load)
        assert loaded == {"path": path, "model_id": f"{session}:train:0", "type": "load_weights"}
        assert service.learner.models[f"{session}:train:0"] == 1
        assert (await service.post("get_info", {"model_id": f"{session}:train:0"}))["lora_rank"] == 4
        await service.delete(f"training_runs/{model}/checkpoints/weights/first", status=204)
        assert not folder.exists()
        load |= {"model_seq_id": 1}
        assert "no checkpoint" in (await service.done("load_weights", load))["error"]


@pytest.mark.parametrize(
    ("step", "error"), [("size_of", OSError("no descriptor")), ("record", StateError("disk full"))]
)
async def test_a_replaced_checkpoint_stays_until_its_successor_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    failed = []

    def fails(*_: object) -> None:
        failed.append(step)
        raise error

    async with rig(tmp_path) as service:
        model = await service.model()
        path = (await saved(service, model, 1, path="a"))["path"]
        (old,) = (tmp_path / "checkpoints").glob("*/weights/*")
        monkeypatch.setattr(training, step, fails)
        body = {"model_id": model, "seq_id": 2, "path": "a", "overwrite": True}
        future = await service.post("save_weights", body)
        if step == "size_of":
            assert "no descriptor" in (await service.result(future))["error"]
        await until(lambda: failed)
        assert old.is_dir()
        monkeypatch.undo()
        await service.result(await service.step(model, 3))  # begins after the end of the save
        assert old.is_dir() or step == "record"
        load = {"path": path, "optimizer": True, "model_id": model, "seq_id": 4}
        assert "error" not in await service.done("load_weights", load)


async def test_others_read_what_is_published_and_nothing_else(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        model = await service.model()
        path = (await saved(service, model, 1, path="a"))["path"]
        publish = f"training_runs/{model}/checkpoints/weights/a/publish"
        await service.post("weights_info", {"tinker_path": path}, key=OTHER_KEY, status=404)
        await service.post(publish, key=OTHER_KEY, status=404)
        await service.post(publish, status=204)
        await service.post("weights_info", {"tinker_path": path}, key=OTHER_KEY)
        session = await service.session(OTHER_KEY)
        load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
        assert "path" in await service.result(await service.post("load_weights", load, key=OTHER_KEY), key=OTHER_KEY)
        await service.delete(f"training_runs/{model}/checkpoints/weights/a", key=OTHER_KEY, status=404)
        await service.delete(publish, status=204)
        await service.post("weights_info", {"tinker_path": path}, key=OTHER_KEY, status=404)


async def test_a_checkpoint_ends_with_its_time(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        model = await service.model()
        path = (await saved(service, model, 1, path="a", ttl_seconds=3600))["path"]
        (listed,) = (await service.get("checkpoints"))["checkpoints"]
        assert listed["expires_at"] > listed["time"]
        await service.database.run(lambda c: c.execute(checkpoints.update().values(expires=1.0)))
        await service.post("weights_info", {"tinker_path": path}, status=404)
        assert (await service.get("checkpoints"))["checkpoints"] == []
        await service.put(f"training_runs/{model}/checkpoints/weights/a/ttl", {"ttl_seconds": None}, status=204)
        await service.post("weights_info", {"tinker_path": path})


async def test_a_sampler_that_is_not_used_any_more_gives_its_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as service:
        model = await service.model()
        for number, kind in enumerate(("snapshot", "inflight", "inflight")):
            body = {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number, "kind": kind}
            found = await service.done("save_weights_for_sampler", body)
            assert found["sampling_session_id"].endswith(f":sample:{number}")
        folders = sorted(str(folder) for folder in (tmp_path / "samplers").glob("*/*"))
        assert len(folders) == 2, "samplers of kind inflight share one"
        known = Sessions(service.database)
        assert await known.unused_folders() == []
        monkeypatch.setattr(sessions, "UNUSED_S", -10.0)
        assert sorted(str(tmp_path / folder) for folder in await known.unused_folders()) == folders
        assert await known.unused_folders() == []
        body = {"model_id": model, "seq_id": 9, "path": "named"}
        path = (await service.done("save_weights_for_sampler", body))["path"]
        await service.sampler(model.partition(":")[0], 9, model_path=path)
        assert await known.unused_folders() == [], "a checkpoint has it"
        await service.delete(f"training_runs/{model}/checkpoints/sampler_weights/named", status=204)
        assert [(tmp_path / folder).is_dir() for folder in await known.unused_folders()] == [True]


async def test_a_data_folder_that_was_moved_keeps_its_checkpoints(tmp_path: Path) -> None:
    old, new = tmp_path / "samplers" / "old", tmp_path / "old" / "new"
    old.mkdir(parents=True)
    async with rig(old) as service:
        model = await service.model()
        path = (await saved(service, model, 1, path="checkpoints"))["path"]
        body = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 1}
        sampler = (await service.done("save_weights_for_sampler", body))["sampling_session_id"]
    new.parent.mkdir()
    old.rename(new)
    async with rig(new) as service:
        (folder,) = new.glob("checkpoints/*/weights/*")
        load = {"session_id": await service.session(), "model_seq_id": 0, "path": path, "optimizer": False}
        assert (await service.done("load_weights", load))["path"] == path
        source = await Sessions(service.database).source("alice", sampler)
        assert source.folder is not None
        assert (new / source.folder / "adapter_config.json").is_file()
        await service.delete(f"training_runs/{model}/checkpoints/weights/checkpoints", status=204)
        assert not folder.exists()


@pytest.mark.parametrize(
    "path",
    [
        "tinker://a:train:0/weights/../../etc",
        "tinker://a:train:0/weights/..",
        "tinker://../weights/a",
        "tinker://a:train:0/other/a",
        "/etc/passwd",
        "tinker://a:train:0/weights/a/b",
        "tinker://a:train:0/weights/a\nb",
        "tinker://a:train:0/weights/",
    ],
)
def test_a_path_names_nothing_outside_the_data_folder(path: str) -> None:
    with pytest.raises(UserError):
        TinkerPath.of(path)


async def test_rows_of_an_ended_session_go_but_for_what_a_checkpoint_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as service:
        with_files, plain, live = [await service.model() for _ in range(3)]
        owners = [model.partition(":")[0] for model in (with_files, plain, live)]
        drawn = [await service.sampler(session) for session in owners]
        path = (await service.done("save_weights", {"model_id": with_files, "seq_id": 1}))["path"]
        saving = await service.post("save_weights_for_sampler", {"model_id": with_files, "seq_id": 2, "path": "kept"})
        sampled = (await service.result(saving))["path"]
        reader = await service.session()
        drawn.append(await service.sampler(reader, model_path=sampled))
        for session in (*owners[:2], reader):
            await service.post(f"sessions/{session}/finish", {}, status=204)
        known = Sessions(service.database)

        async def runs() -> set[str]:
            return {run["training_run_id"] for run in (await service.get("training_runs"))["training_runs"]}

        await known.source("alice", drawn[1])
        await known.forget()
        assert len(await runs()) == len((await service.get("sessions"))["sessions"]) - 1 == 3, "it is not long ago"
        for name in ("KEEP_S", "UNUSED_S"):
            monkeypatch.setattr(sessions, name, -10.0)
        async with asyncio.timeout(60.0):
            while await runs() != {with_files, live}:
                await known.forget()
        with pytest.raises(UnknownError, match="no sampler"):
            await known.source("alice", drawn[1])
        assert set((await service.get("sessions"))["sessions"]) == {owners[0], owners[2]}
        assert [c["tinker_path"] for c in (await service.get("checkpoints"))["checkpoints"]] == [sampled, path]
        for sampler, status in zip(drawn, (200, 404, 200, 404), strict=True):
            await service.get(f"samplers/{sampler}", status=status)
        assert "metrics" in await service.result(await service.step(live, 1))
        load = {"path": path, "optimizer": True, "model_id": live, "seq_id": 2}
        assert "error" not in await service.done("load_weights", load)
