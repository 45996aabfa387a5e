"""The scenarios: every configuration holds, what cannot run says so, each kind runs on simulated engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from penstock.config import EnvironmentConfig, RunConfig
from penstock.control_types import EngineUpdate, UpdateReport
from penstock.engine.command import server_command
from penstock.errors import ConfigError, UserError
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter
from penstock.rollout.environment import load_environment
from penstock.rollout.gsm8k import GSM8K
from penstock.train.learner import LocalLearner
from penstock.train.run import run
from penstock.train.scenarios import run as scenario_run
from penstock.train.scenarios import table
from penstock.train.scenarios.run import RESULTS, Result, run_scenario, stand_in, training_checks
from penstock.train.scenarios.table import SCENARIOS, check_machine, scenario_named
from penstock.train.schedules import SCHEDULES, check_schedule

MODEL = Path(__file__).parents[2] / "examples" / "models" / "sorter-0.8m"
SHORT = ("train.steps=2", "rollout.groups_per_batch=2", "rollout.group_size=2", "eval.size=4")


def test_there_are_the_sixteen_of_the_plan_and_every_schedule_is_among_them(tmp_path: Path) -> None:
    assert len(SCENARIOS) == 16
    configs = [each.config(profile="sim", run_dir=tmp_path, model=MODEL) for each in SCENARIOS.values()]
    assert {config.train.schedule for config in configs} == set(SCHEDULES)
    for config in configs:
        check_schedule(config)


@pytest.mark.parametrize(
    ("name", "profile", "gpus", "message"),
    [
        ("colocated-tp1", "cpu", 0, "needs 1-4 NVIDIA GPUs: vLLM's CPU build cannot run it"),
        ("colocated-tp1", "gpu", 0, "needs 1-4 NVIDIA GPUs; this machine has 0 GPUs"),
        ("colocated-tp2", "gpu", 1, "needs 2-4 NVIDIA GPUs; this machine has 1 GPU"),
        ("one-step-off", "gpu", 1, "needs a CPU, or 2 NVIDIA GPUs; this machine has 1 GPU; give --cpu"),
        ("async", "gpu", 0, "needs a CPU, or an NVIDIA GPU; this machine has 0 GPUs; give --cpu"),
        ("megatron", "gpu", 8, r"needs a Megatron learner, which is not there yet \(and 5 NVIDIA GPUs\)"),
        ("native-sync", "cpu", 0, "needs 2 NVIDIA GPUs: vLLM's CPU build cannot run it"),
        ("cuda-ipc", "gpu", 1, ""),
        ("lora", "cpu", 0, ""),
    ],
)
def test_what_a_machine_cannot_run_is_said_in_one_line(
    name: str, profile: str, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    if message:
        with pytest.raises(UserError, match=message) as caught:
            check_machine(scenario_named(name), profile)
        assert "\n" not in str(caught.value)
    else:
        check_machine(scenario_named(name), profile)


@pytest.mark.parametrize(
    ("name", "gpus", "shape"),
    [
        ("colocated-tp1", 1, "1 of 4 engines"),
        ("colocated-tp1", 3, "2 of 4 engines"),
        ("colocated-tp1", 4, ""),
        ("colocated-tp2", 2, "1 of 2 engines"),
        ("moe", 1, "TP1 of TP2, colocated"),
        ("moe", 2, "colocated"),
        ("moe", 3, ""),
        ("non-colocated", 2, "1 of 2 engines"),
        ("one-step-off", 2, "1 of 2 engines"),
        ("async", 2, "1 of 2 engines"),
        ("async", 3, ""),
        ("lora", 1, "1 of 2 engines"),
        ("cuda-ipc", 1, ""),
    ],
)
def test_fewer_gpus_keep_the_shape_and_the_row_says_so(
    name: str, gpus: int, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = SCENARIOS[name]
    found = check_machine(chosen, "gpu")
    config = chosen.config(profile="gpu", run_dir=tmp_path, model=MODEL, gpus=found)
    check_schedule(config)
    engines = config.fleet.engines * config.engine.tensor_parallel_size
    assert max(engines, config.train.ranks) <= gpus
    assert chosen.smaller_shape(config) == shape
    assert Result(name, "gpu", [], 1.0, shape).row().startswith(f"{name} (gpu{', ' + shape if shape else ''}): ok")


@pytest.mark.parametrize(
    ("quantization", "gap", "ok"), [("int8", 0.006, True), ("int8", 0.033, False), ("fp8", 0.02, True)]
)
def test_engines_that_round_are_judged_by_the_worst_mean_of_a_step(
    quantization: str, gap: float, tmp_path: Path, *, ok: bool
) -> None:
    keys = [f"engine.quantization={quantization}"]
    config = SCENARIOS["quantised"].config(profile="gpu", run_dir=tmp_path, model=MODEL, overrides=keys)
    rows = [{scenario_run.EQUAL_MEAN: gap}, {}, {scenario_run.EQUAL_MEAN: 0.001}]
    check = scenario_run._logprob_check(config, Mock(logprob_difference=2.0), rows)
    assert (check.ok, check.figure) == (ok, f"{gap:.1e} on average")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.quantization=fp8", "choose int8, or engines on a GPU for fp8"),
        ("fleet.weight_transport=cuda_ipc", "cuda_ipc needs GPUs, and torch sees none here; set it to auto"),
    ],
)
async def test_what_cpus_cannot_do_is_refused_before_anything_starts(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = SCENARIOS["quantised"].config(profile="cpu", run_dir=tmp_path, model=MODEL, overrides=[override])
    with pytest.raises(ConfigError, match=message) as caught:
        await run(config, resume=False, fresh=True, reporter=Reporter())
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no scenario 'asink'; known: colocated-tp1, non-colocated"):
        scenario_named("asink")
    with pytest.raises(UserError, match="no model in /nowhere"):
        SCENARIOS["async"].config(profile="cpu", run_dir=tmp_path, model=Path("/nowhere"))
    with pytest.raises(UserError, match="=cpu: a scenario depends on it; give --cpu, --sim or neither"):
        SCENARIOS["async"].config(profile="sim", run_dir=tmp_path, model=MODEL, overrides=["engine.profile=cpu"])


@pytest.mark.parametrize("name", ["one-step-off", "multi-turn", "remote-server", "gsm8k"])
async def test_a_training_scenario_runs_and_is_checked(name: str, tmp_path: Path) -> None:
    chosen = SCENARIOS[name]
    config = chosen.config(profile="sim", run_dir=tmp_path, model=MODEL, overrides=SHORT)
    result = await run_scenario(chosen, config)
    assert result.ok, result.row()
    names = [check.name for check in result.checks]
    assert names[:4] == ["engines", "versions", "checksums", "staleness"]
    assert ("server" in names) == (name == "remote-server")
    [row] = map(json.loads, (tmp_path / RESULTS).read_text().splitlines())
    assert row["scenario"] == name
    assert row["ok"] is True


def checklist(config: RunConfig, rows: list[dict[str, float]], reports: list[UpdateReport], **summary: Any) -> Any:
    """The checks of a run with these rows of metrics, by name."""
    folder = RunFolder.create(config.run_dir / config.name, config)
    for row in rows:
        folder.append_metrics(row)
    totals = Mock(**{"logprob_difference": 1e-5, "accuracy_before": 0.4, "accuracy_after": 0.51, **summary})
    checks = training_checks(config, totals, reports, engines=2, gains=config.name == "async")
    return {check.name: check for check in checks}


def report(version: int, *checksums: str) -> UpdateReport:
    engines = tuple(EngineUpdate(name, {}, 0, checksum) for name, checksum in zip("ab", checksums, strict=False))
    return UpdateReport(version, 1, {}, engines, {})


@pytest.mark.parametrize("broken", ["", "engines", "versions", "checksums", "staleness", "accuracy"])
def test_each_point_of_the_checklist_can_fail(broken: str, tmp_path: Path) -> None:
    config = SCENARIOS["async"].config(profile="cpu", run_dir=tmp_path, model=MODEL, overrides=["train.steps=2"])
    sums = {"engines": ["x"], "checksums": ["x", "y"]}.get(broken, ["x", "x"])
    reports = [report(1, "x", "x"), report(3 if broken == "versions" else 2, *sums)]
    rows = [{"step": 1, "staleness_max": 1}, {"step": 2, "staleness_max": 2 if broken == "staleness" else 1}]
    checks = checklist(config, rows, reports, accuracy_after=0.49 if broken == "accuracy" else 0.51)
    assert [name for name, check in checks.items() if not check.ok] == ([broken] if broken else [])


def test_an_adapters_updates_are_not_asked_for_checksums(tmp_path: Path) -> None:
    """Engines report none of an adapter, and the scenario failed for it."""
    config = SCENARIOS["lora"].config(profile="sim", run_dir=tmp_path, model=MODEL, overrides=["train.steps=1"])
    checks = checklist(config, [{"step": 1, "staleness_max": 0}], [report(2, "", "")])
    assert {name: check.ok for name, check in checks.items()} == dict.fromkeys(
        ("engines", "versions", "staleness"), True
    )


@pytest.mark.parametrize(("share", "ok"), [(1.0, True), (0.0, False)])
def test_a_mixture_of_experts_is_asked_whether_its_experts_were_replayed(
    share: float, tmp_path: Path, *, ok: bool
) -> None:
    config = SCENARIOS["moe"].config(profile="gpu", run_dir=tmp_path, model=MODEL.parent, gpus=1)
    check = checklist(config, [{"step": 1, "staleness_max": 0, "replayed_share": share}], [])["replayed"]
    assert (check.ok, check.figure) == (ok, f"{share:.1%} of tokens at least")


@pytest.mark.parametrize("name", ["pause-keep", "http-generator"])
async def test_a_scenario_without_training_runs_and_is_checked(name: str, tmp_path: Path) -> None:
    chosen = SCENARIOS[name]
    overrides = ["engine.extra_args.tokens-per-second=100", "fleet.engines=1"]
    config = chosen.config(profile="sim", run_dir=tmp_path, model=MODEL, overrides=overrides)
    result = await run_scenario(chosen, config)
    assert all(check.ok for check in result.checks), result.row()


async def test_a_scenario_replaces_its_own_run_and_no_other(tmp_path: Path) -> None:
    """It deleted a training run of its name in the folder that it was given."""
    chosen = SCENARIOS["async"]
    config = chosen.config(profile="sim", run_dir=tmp_path, model=MODEL, overrides=[*SHORT, "fleet.engines=1"])
    mine = RunFolder.create(tmp_path / "async", config)
    mine.append_metrics({"step": 1})
    with pytest.raises(
        UserError, match=r"/async would be replaced, and no scenario made it, or a kill ended it; remove"
    ):
        await run_scenario(chosen, config)
    assert mine.metrics() == [{"step": 1}]
    again = config.model_copy(update={"name": "again"})
    for schedule, ahead in (("async", True), ("sync", False)):
        train = again.train.model_copy(update={"schedule": schedule})
        result = await run_scenario(chosen, again.model_copy(update={"train": train}))
        assert {check.name: check.ok for check in result.checks}["ahead"] == ahead
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot make the folder .*/file"):
        await run_scenario(chosen, config.model_copy(update={"run_dir": tmp_path / "file"}))


# --- GSM8K -----------------------------------------------------------------------------------------------------------


def test_gsm8k_keeps_its_split_and_orders_each_pass_anew(tmp_path: Path) -> None:
    environment = GSM8K(seed=3, path=str(stand_in(tmp_path)), instruction="")
    passes = [[environment.train_task(64 * p + i).id for i in range(64)] for p in range(2)]
    assert [len(set(ids)) for ids in passes] == [64, 64], "each problem once a pass"
    assert passes[0] != passes[1]
    heldout = environment.heldout_tasks(16)
    assert not {task.prompt for task in heldout} & {environment.train_task(i).prompt for i in range(64)}
    with pytest.raises(UserError, match="16 tasks are held out, 17 were asked for"):
        environment.heldout_tasks(17)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("#### 1234", 1.0),
        ("so 7 and then #### 1,234.", 1.0),
        ("the answer is 1234.0", 1.0),
        ("#### 12", 0.0),
        ("1234 is wrong, #### 9", 0.0),
        ("no number", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_scores_the_number_behind_the_mark_or_the_last_one(tmp_path: Path, response: str, reward: float) -> None:
    for split in ("train", "test"):
        row = {"question": "q?", "answer": "600*2=1200\n#### 1,234"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    environment = load_environment(
        EnvironmentConfig(name="penstock.rollout.gsm8k:GSM8K", options={"path": str(tmp_path)}), 0
    )
    assert environment.reward(environment.train_task(0), response) == reward


def test_what_is_no_gsm8k_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"has neither train\.jsonl nor main/train-\*\.parquet"):
        GSM8K(seed=0, path=str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="no dataset 'no/where'"):
        GSM8K(seed=0, path="no/where")


async def test_gsm8ks_options_are_the_callers(tmp_path: Path) -> None:
    """They were replaced by those of a generated data set, and the checklist held."""
    chosen, folder = SCENARIOS["gsm8k"], stand_in(tmp_path / "mine")
    (folder / "test.jsonl").write_text('{"question": "q", "answer": "#### 7"}')
    keys = [*SHORT, f"environment.options.path={folder}"]
    config = chosen.config(profile="sim", run_dir=tmp_path / "runs", model=MODEL, overrides=keys)
    with pytest.raises(UserError, match="1 tasks are held out, 4 were asked for"):
        await run_scenario(chosen, config)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "answer": "She sold 48/2 = 24 in May.\nSo 72 in all."},
        {"question": "q", "answer": 7},
        {"question": None, "answer": "#### 7"},
        ["q", "#### 7"],
    ],
)
def test_a_row_of_another_shape_is_named(row: object, tmp_path: Path) -> None:
    good = json.dumps({"question": "q", "answer": "#### 7"})
    (tmp_path / "train.jsonl").write_text(f"{good}\n{json.dumps(row)}\n")
    with pytest.raises(ConfigError, match=r"row 2 of 'train' is none of GSM8K: each has .* '#### NUMBER'") as caught:
        GSM8K(seed=0, path=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_model_of_experts_is_made_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODEL.parents[2])
    config = SCENARIOS["moe"].config(profile="gpu", run_dir=tmp_path, model=table.MODEL, gpus=2)
    assert config.engine.model == str(tmp_path / "moe-stand-in")
    assert "--enable-expert-parallel" in server_command(config.engine, api_key=None).argv
    learner = LocalLearner(config.engine.model, config.train, seed=0)
    assert learner.policy.vocabulary == 100
