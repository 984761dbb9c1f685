"""``explain``, ``simulate``, ``compare``, ``solve --sweep`` and ``--batch-size auto`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazysched.cli import main
from lazysched.profiles.library_files import load_hardware
from lazysched.schemas import Plan
from lazysched.solver import solve
from tests.packaging.test_cli import refused as refused_line
from tests.solver.synthetic import tiny_profile

MB = 1_000_000
SOLVE = ["solve", "profile.json", "--batch-size", "1", "--host-memory", "1GB"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(tiny_profile(3), batch_size=1, gpu_memory_bytes=60 * MB, host_memory_bytes=1000 * MB).plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1))
    profile = tiny_profile(3)
    profile.save("profile.json")
    tiny_profile(3, link_bytes_per_s=0.1e9).save("slow.yaml")
    profile.model_copy(update={"model_id": "other"}).save("other.json")
    load_hardware("h200").save("h.yaml")
    plan.save("plan.json")
    plan.model_copy(update={"profile": None}).save("bare.json")
    plan.model_copy(update={"model_id": "other", "profile": None}).save("other_plan.json")
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], exit_code: int = 2) -> str:
    """What the one line on stderr of a command that is refused says."""
    return refused_line(capsys, arguments, exit_code).removeprefix("error: ")


@pytest.mark.usefixtures("folder")
class TestRefusals:
    @pytest.mark.parametrize("command", ["explain", "simulate"])
    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["absent.json"], "absent.json: no such file"),
            (["profile.json"], "profile.json: is a profile, not a plan"),
            (["bare.json"], "bare.json: profile: null, as in a plan written by hand; name one with --profile"),
            (["plan.json", "--profile", "bare.json"], "bare.json: is a plan without a profile"),
            (["plan.json", "--profile", "h.yaml"], "h.yaml: is a hardware file, not a profile; estimate with it: "),
            (["plan.json", "--profile", "other.json"], "profile: model_id: measured with other"),
            ([], "PLAN"),
        ],
    )
    def test_of_one_plan(
        self, capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], named: str
    ) -> None:
        assert named in refused(capsys, [command, *arguments])

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["simulate", "plan.json", "--trace", "absent/t.json"], "the folder absent does not exist"),
            (["simulate", "plan.json", "--trace", "."], "--trace: . is a folder"),
            (["explain", "plan.json", "--time-limit", "-1"], "--time-limit"),
            (["explain", "plan.json", "--time-limit", "inf"], "time_limit_s: inf"),
            (["compare", "plan.json", "other_plan.json"], "synthetic and other are different models"),
            (["compare", "plan.json", "profile.json"], "is a profile, not a plan"),
            (["compare", "plan.json"], "PLAN_B"),
            ([*SOLVE, "-o", "p.json", "--sweep", "disk=1GB:2GB:1GB"], "'disk' cannot be swept"),
            ([*SOLVE, "-o", "p.json", "--sweep", "gpu-memory=2GB:1GB:1GB"], "starts above its end"),
            ([*SOLVE, "-o", "p.json", "--sweep", "host-memory=1GB:2GB:1GB"], "--host-memory: means nothing"),
            (
                ["solve", "profile.json", "--batch-size", "auto", "-o", "p", "--sweep", "gpu-memory=1GB:2GB:1GB"],
                "--batch-size: auto means nothing with --sweep",
            ),
            (["solve", "profile.json", "--batch-size", "many", "-o", "p.json"], "--batch-size: 'many'"),
            (["solve", "profile.json", "--batch-size", "-2", "-o", "p.json"], "--batch-size: '-2'"),
        ],
    )
    def test_of_other_arguments(self, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
        before = sorted(Path().iterdir())
        assert named in refused(capsys, arguments)
        assert sorted(Path().iterdir()) == before


@pytest.mark.usefixtures("folder")
class TestSimulate:
    def test_a_plan_as_it_was_solved(self, capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
        assert plan.predicted is not None
        assert main(["simulate", "plan.json", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["step_s"] == pytest.approx(plan.predicted.step_s)
        assert (found["over_bytes"], found["stale"]) == ({}, [])
        assert main(["simulate", "plan.json"]) == 0
        text = capsys.readouterr().out
        assert "stale" not in text
        assert "does not fit" not in text
        assert "60 MB" in text

    def test_an_edited_plan_is_simulated_as_it_stands(self, capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
        assert plan.predicted is not None
        edited = json.loads(Path("plan.json").read_text(encoding="utf-8"))
        edited["budget_bytes"]["gpu"] = 30 * MB
        for stage in edited["stages"].values():
            stage["weights"] = stage["state"] = "gpu"
        Path("edited.json").write_text(json.dumps(edited), encoding="utf-8")
        assert main(["simulate", "edited.json"]) == 1
        text = capsys.readouterr().out
        assert "does not fit: gpu" in text
        assert "the prediction in the plan is stale" in text
        assert main(["simulate", "edited.json", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["over_bytes"] == {"gpu": found["peak_bytes"]["gpu"] - 30 * MB}
        assert "peak_bytes" in found["stale"]
        assert found["stored_step_s"] == plan.predicted.step_s

    def test_another_machine(self, capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
        assert plan.predicted is not None
        assert main(["simulate", "bare.json", "--profile", "slow.yaml", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step_s"] > plan.predicted.step_s
        slow = tiny_profile(3, link_bytes_per_s=0.1e9)
        plan.model_copy(update={"profile": slow}).save("slow_plan.json")
        assert main(["simulate", "bare.json", "--profile", "slow_plan.json", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step_s"] > plan.predicted.step_s
        assert main(["simulate", "plan.json", "--profile", "slow.yaml"]) == 0
        assert "the plan's own prediction, for the machine it was solved for" in capsys.readouterr().out

    def test_a_trace_for_perfetto(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["simulate", "plan.json", "--trace", "t.json"]) == 0
        assert "wrote t.json" in capsys.readouterr().out
        events = json.loads(Path("t.json").read_text(encoding="utf-8"))["traceEvents"]
        assert {"forward/block.0/0", "backward/block.2/0"} <= {event["name"] for event in events}


@pytest.mark.usefixtures("folder")
class TestExplainAndCompare:
    def test_explain_in_words_and_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", "plan.json", "--time-limit", "5"]) == 0
        text = capsys.readouterr().out
        for title in ("What binds", "What a little more would buy", "What each decision costs", "Where compute waits"):
            assert title in text
        assert "Memory binds: with more of gpu" in text
        assert main(["explain", "plan.json", "--time-limit", "0", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["binding_engine"] == "compute"
        assert found["bound_s"] is None
        assert {stage for costs in found["stages"] for stage in costs["stages"]} >= {"embed", "block.0", "head"}

    def test_compare_in_words_and_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*SOLVE, "--gpu-memory", "200MB", "-o", "roomy.json"]) == 0
        capsys.readouterr()
        assert main(["compare", "plan.json", "roomy.json"]) == 0
        text = capsys.readouterr().out
        assert "roomy.json" in text
        assert "gpu budget" in text
        assert main(["compare", "plan.json", "roomy.json", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["settings"] == [{"where": "gpu budget", "field": "", "a": "60 MB", "b": "200 MB"}]


@pytest.mark.usefixtures("folder")
class TestSolvingManyTimes:
    def test_a_sweep_writes_a_table_beside_the_fastest_plan(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*SOLVE, "-o", "new.json", "--sweep", "gpu-memory=20MB:140MB:60MB"]) == 0
        text = capsys.readouterr().out
        assert "infeasible" in text
        assert "wrote new.csv, new.json" in text
        assert len(Path("new.csv").read_text(encoding="utf-8").splitlines()) == 4
        assert main(["simulate", "new.json", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["stale"] == []

    def test_a_sweep_may_write_the_table_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        before = set(Path().iterdir())
        assert main([*SOLVE, "-o", "frontier.csv", "--sweep", "gpu-memory=20MB:20MB:1MB"]) == 0
        assert set(Path().iterdir()) - before == {Path("frontier.csv")}
        assert "wrote frontier.csv" in capsys.readouterr().out

    def test_a_sweep_in_which_nothing_fits_keeps_its_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*SOLVE, "-o", "new.json", "--sweep", "gpu-memory=10MB:20MB:10MB"]) == 1
        assert "no plan fits at any budget of the sweep" in capsys.readouterr().err
        assert Path("new.csv").is_file()
        assert not Path("new.json").exists()

    def test_the_batch_of_the_largest_throughput(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["solve", "profile.json", "--batch-size", "auto", "--gpu-memory", "1GB", "--host-memory", "1GB"]
        assert main([*arguments, "-o", "new.json"]) == 0
        text = capsys.readouterr().err
        assert "batch of 1: " in text
        assert "batch of 2: " in text
        assert Plan.load("new.json").batch_size in (1, 2)
