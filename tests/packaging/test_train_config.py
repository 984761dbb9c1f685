"""Settings of a run: one file and flags, flags win; other tools' names; what a plan was not solved for is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lazysched.cli import main
from lazysched.foreign_settings import INSTEAD
from lazysched.runtime import reporters
from lazysched.schemas import Plan, Prediction
from lazysched.solver import simulate_plan, solve
from lazysched.train_config import ALIASES, NEEDED, PLANNED, TrainConfig, read_config
from tests.packaging.test_cli import PLAN, Calls, refused, replace_module
from tests.solver.synthetic import tiny_profile

SETTINGS = "model_name_or_path: m\ndataset: d.jsonl\noutput-dir: out\nplan: plan.json\nlearning_rate: 1e-5\nseed: 7\n"
RESULT = SimpleNamespace(
    measured_step_s=None, predicted_step_s=1.5, num_skipped=0, timed=None, predicted_exposed_s={},
    predicted_moved_bytes={}, peak_bytes={}, held_out_loss_before=None, output_dir=Path("out"),
)  # fmt: skip


class Prepared(Calls):
    """Stands in for ``prepare``: gives a run of three steps by the plan that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.has_trained = False

    def __call__(self, *positional: Any, **keywords: Any) -> object:
        super().__call__(*positional, **keywords)
        return SimpleNamespace(plan=positional[0], num_steps=3, num_epochs=1.5, to_end=self._trained)

    def _trained(self) -> object:
        self.has_trained = True
        return RESULT


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.chdir(tmp_path)
    predicted = Prediction(
        step_s=1.0, exposed_s={}, moved_bytes={}, peak_bytes={"gpu": 3_000_000_000, "host": 5_000_000_000, "nvme": 0}
    )
    budget_bytes = {"gpu": 4_000_000_000, "host": 6_000_000_000, "nvme": 0}
    plan = PLAN.model_copy(update={"batch_size": 8, "accumulation": 4, "predicted": predicted})
    Plan.model_validate(plan.model_dump() | {"budget_bytes": budget_bytes}).save("plan.json")
    Path("c.yaml").write_text(SETTINGS, encoding="utf-8")
    calls = Prepared()
    replace_module(monkeypatch, "lazysched.runtime.train", prepare=calls)
    return calls


def test_a_file_gives_the_settings_and_flags_win(run: Prepared) -> None:
    assert main(["train", "c.yaml", "--seed", "9", "--output-dir", "elsewhere"]) == 0
    # YAML calls 1e-5 a text.
    assert (run["model"], run["data"], run["learning_rate"]) == ("m", "d.jsonl", 1e-5)
    assert (run["seed"], run["output_dir"], run["device"]) == (9, "elsewhere", None)


def test_a_flag_that_repeats_the_default_wins_too(run: Prepared) -> None:
    assert main(["train", "c.yaml", "--learning-rate", "2e-5", "--seed", "42"]) == 0
    assert (run["learning_rate"], run["seed"]) == (2e-5, 42)


def test_a_files_tilde_is_the_home_folder(run: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    Path("plan.json").rename(home / "plan.json")
    monkeypatch.setenv("HOME", str(home))
    Path("c.yaml").write_text(SETTINGS.replace(": out", ": ~/out").replace(": plan.json", ": ~/plan.json"))
    assert main(["train", "c.yaml"]) == 0
    assert run["output_dir"] == str(home / "out")


def test_a_plan_that_was_edited_is_predicted_anew(run: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one trains whose profile lacks a figure."""
    profile = tiny_profile(3, micro_batches=(1, 2))
    solved = solve(profile, batch_size=2, gpu_memory_bytes=10**9, host_memory_bytes=10**9).plan
    solved.save("plan.json")
    assert main(["train", "c.yaml"]) == 0
    assert "edited" not in capsys.readouterr().out
    edited = solved.model_copy(update={"batch_size": 4, "accumulation": 2 * solved.accumulation})
    edited.save("plan.json")
    assert main(["train", "c.yaml"]) == 0
    assert "the plan was edited since it was simulated (step_s" in " ".join(capsys.readouterr().out.split())
    assert run.positional[0].predicted == simulate_plan(edited).prediction()
    edited.model_copy(update={"profile": profile.model_copy(update={"update": {}})}).save("plan.json")
    assert main(["train", "c.yaml"]) == 0
    assert run.positional[0].predicted is None


def test_a_plan_beyond_its_own_budget_is_told(run: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tiny_profile(3, micro_batches=(1, 2))
    solved = solve(profile, batch_size=2, gpu_memory_bytes=10**9, host_memory_bytes=10**9).plan
    solved.model_copy(update={"budget_bytes": solved.budget_bytes | {"gpu": 1}}).save("plan.json")
    assert main(["train", "c.yaml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "of gpu, its budget_bytes has 1 B; raise that if there is so much, or solve anew" in said
    assert "of host, its" not in said


def test_flags_alone_suffice_under_either_name(run: Prepared) -> None:
    flags = ["--plan", "plan.json", "--model_name_or_path", "m", "--dataset", "d.jsonl", "--output_dir", "out"]
    assert main(["train", *flags]) == 0
    assert (run["model"], run["data"]) == ("m", "d.jsonl")


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_every_other_name_is_a_setting(tmp_path: Path, alias: str, name: str) -> None:
    assert name in TrainConfig.model_fields
    file = tmp_path / "c.yaml"
    file.write_text(f"{alias.replace('_', '-')}: 3\n", encoding="utf-8")
    assert read_config(file) == {name: 3}


def test_what_the_run_takes_is_what_the_settings_are(run: Prepared) -> None:
    """Every field but those that are checked against the plan, and what binds the process, reaches the run."""
    assert main(["train", "c.yaml"]) == 0
    assert set(run) == set(TrainConfig.model_fields) - {*PLANNED, "plan", "numa_bind"} | {"console"}


@pytest.mark.parametrize(
    ("text", "names"),
    [("none", []), ("[]", []), ("wandb", ["wandb"]), ("tensorboard, wandb", ["tensorboard", "wandb"]),
     ("[trackio, wandb]", ["trackio", "wandb"])],
)  # fmt: skip
def test_reporters_are_a_list(run: Prepared, monkeypatch: pytest.MonkeyPatch, text: str, names: list[str]) -> None:
    monkeypatch.setattr(reporters, "find_spec", lambda name: name)
    Path("c.yaml").write_text(f"{SETTINGS}report_to: {text}\n", encoding="utf-8")
    assert main(["train", "c.yaml"]) == 0
    assert run["report_to"] == names
    flags = [part for name in names for part in ("--report-to", name)]
    assert main(["train", "c.yaml", *(flags or ["--report_to", "none"])]) == 0
    assert run["report_to"] == names


def test_a_missing_reporter_is_refused_before_a_plan_is_made(
    run: Prepared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporters, "find_spec", lambda name: None)
    Path("c.yaml").write_text(SETTINGS.replace("plan: plan.json\n", ""), encoding="utf-8")
    message = refused(capsys, ["train", "c.yaml", "--report-to", "tensorboard"])
    assert "report_to: tensorboard is not installed; run pip install 'lazysched[tensorboard]'" in message
    assert not run


@pytest.mark.parametrize(
    "text", ["trainable: lm_head", "trainable: [lm_head]", "unfrozen_parameters:\n  - lm_head\n  - lm_head"]
)
def test_what_is_trained_is_checked_against_the_plan(
    run: Prepared, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    Path("c.yaml").write_text(f"{SETTINGS}{text}\n", encoding="utf-8")
    assert "trainable: lm_head" in refused(capsys, ["train", "c.yaml"])
    Plan.load("plan.json").model_copy(update={"trainable": ["lm_head"]}).save("plan.json")
    assert main(["train", "c.yaml"]) == 0
    assert "trained: lm_head" in capsys.readouterr().out
    assert "trainable" not in run


def test_an_empty_list_would_train_nothing(run: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text(f"{SETTINGS}trainable: []\n", encoding="utf-8")
    assert "trainable: no pattern, so that nothing would be trained" in refused(capsys, ["train", "c.yaml"])


def test_transformers_say_true_for_the_newest_checkpoint(run: Prepared) -> None:
    Path("c.yaml").write_text(SETTINGS + "resume_from_checkpoint: true\n", encoding="utf-8")
    assert main(["train", "c.yaml"]) == 0
    assert (run["resume"], run["resume_from_checkpoint"]) == (True, None)
    assert main(["train", "c.yaml", "--resume-from-checkpoint", "false"]) == 0
    assert (run["resume"], run["resume_from_checkpoint"]) == (False, None)
    assert main(["train", "c.yaml", "--resume-from-checkpoint", "checkpoint-2"]) == 0
    assert (run["resume"], run["resume_from_checkpoint"]) == (False, "checkpoint-2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1e-5", "c.yaml: learning_rat: unknown setting; did you mean learning_rate?"),
        ("finetuning_typ: lora", "c.yaml: finetuning_typ: unknown setting; remove it"),
        ("lr: 1e-5", "c.yaml: lr: unknown setting; write learning_rate"),
        ("val-set-size: 0.1", "c.yaml: val-set-size: unknown setting; write eval_data, a file of held-out rows"),
        ("lora_rank: 8", "c.yaml: lora_rank: unknown setting; remove it: all weights are trained here"),
        ("fsdp_config: {a: b}", "c.yaml: fsdp_config: unknown setting; remove it: the plan decides"),
        ("stage: dpo", "c.yaml: stage: unknown setting; remove it: supervised fine-tuning is all there is"),
        (
            "trust_remote_code: true\nlearning_rat: 1\ncolour: 2",
            "c.yaml: unknown settings: trust_remote_code (remove it: lazysched runs no code out of a model's folder), "
            "learning_rat (did you mean learning_rate?), colour; remove or rename them",
        ),
        ("colour: null", "c.yaml: colour: unknown setting; remove it"),
        (
            "cutoff_len: 8\nmax_length: 8",
            "c.yaml: cutoff_len and max_length: max_length is said twice; keep one of them",
        ),
        ("seed: 1\nseed: 2", "c.yaml: seed: seed is said twice; keep one of them"),
        ("learning_rate: yes", "c.yaml: learning_rate: is True: write a number"),
        ("logging_steps: on", "c.yaml: logging_steps: is True: write a number"),
        ("save_total_limit: no", "c.yaml: save_total_limit: is False: write a number"),
        ("learning_rate: fast", "c.yaml: learning_rate: is 'fast': Input should be a valid number"),
        ("warmup_ratio: 2", "c.yaml: warmup_ratio: is 2: Input should be less than or equal to 1"),
        ("lr_scheduler_type: step", "c.yaml: lr_scheduler_type: is 'step': Input should be 'linear', 'cosine' or"),
        ("optimizer: {name: adamw}", "c.yaml: optimizer: unknown setting"),
        ("eval_data: [a, b]", "c.yaml: eval_data: is a list: Input should be a valid string"),
        ("report_to: all", "c.yaml: report_to: is 'all': name those you want of tensorboard, wandb, trackio"),
        ("report_to: mlflow", "c.yaml: report_to.0: is 'mlflow': Input should be 'tensorboard', 'wandb' or 'trackio'"),
        ("trainable: 3", "c.yaml: trainable: is 3: Input should be a valid list"),
        ("- a\n- b", "c.yaml: holds no settings; write lines as learning_rate: 1e-5"),
        ("a: [", "c.yaml: not valid YAML"),
    ],
)
def test_wrong_settings_are_one_line(
    run: Prepared, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    Path("c.yaml").write_text(text, encoding="utf-8")
    flags = ["--plan", "plan.json", "--model", "m", "--data", "d.jsonl", "--output-dir", "out"]
    assert message in refused(capsys, ["train", "c.yaml", *flags])
    assert not run


@pytest.mark.parametrize("key", ["on", "null", "0x10", "~"])
def test_keys_that_yaml_reads_as_something_else_are_unknown(
    run: Prepared, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    Path("c.yaml").write_text(f"{SETTINGS}\n{key}: 3\n", encoding="utf-8")
    assert f"c.yaml: {key}: unknown setting" in refused(capsys, ["train", "c.yaml"])


def test_a_mapping_may_be_merged_in(run: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text(f"{SETTINGS}\n<<: {{max_steps: 7, seed: 3}}\n", encoding="utf-8")
    assert main(["train", "c.yaml"]) == 0
    assert run["max_steps"] == 7
    capsys.readouterr()
    Path("c.yaml").write_text(f"{SETTINGS}\n<<: {{colour: 7}}\n", encoding="utf-8")
    assert "c.yaml: colour: unknown setting" in refused(capsys, ["train", "c.yaml"])


def test_what_others_write_for_no_limit_and_the_models_own_type(run: Prepared) -> None:
    text = f"{SETTINGS}\nmax_steps: -1\nbf16: auto\nreport_to: None\n"
    Path("c.yaml").write_text(text, encoding="utf-8")
    assert main(["train", "c.yaml"]) == 0
    assert (run["max_steps"], run["report_to"]) == (None, [])


def test_a_switch_with_a_value_is_no_file(run: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    for argument in ("true", "False", "learning_rate=1e-5"):
        assert f"{argument}: is no file; flags are written as --bf16" in refused(capsys, ["train", argument])


def test_what_asks_for_nothing_may_stay(run: Prepared) -> None:
    harmless = (
        "finetuning_type: full", "adapter: null", "load_in_8bit: false", "load-in-4bit: false", "lora_r: null",
        "sample_packing: false", "train_on_inputs: false", "do_train: true", "stage: sft", "warmup_steps: 0",
        "trust_remote_code: false", "deepspeed:", "assistant_only_loss: true", "roles_to_train: [assistant]",
    )  # fmt: skip
    Path("c.yaml").write_text("\n".join([SETTINGS, *harmless]), encoding="utf-8")
    assert main(["train", "c.yaml"]) == 0
    assert run


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--num-epochs", "No such option: --num-epochs; write --num-train-epochs"),
        ("--cutoff_len", "No such option: --cutoff-len; write --max-length"),
        ("--lr", "No such option: --lr; write --learning-rate"),
        ("--val-size", "No such option: --val-size; write --eval-data, a file of held-out rows"),
        ("--lora-rank", "No such option: --lora-rank; remove it: all weights are trained here"),
    ],
)
def test_another_tools_flag_names_ours(capsys: pytest.CaptureFixture[str], flag: str, message: str) -> None:
    assert message in refused(capsys, ["train", flag, "3"])


def test_what_stands_for_another_tools_key_is_a_setting_or_a_reason() -> None:
    for key, text in INSTEAD.items():
        assert key not in {*TrainConfig.model_fields, *ALIASES}
        name = text.partition(",")[0]
        assert name in TrainConfig.model_fields or " " in name, key


def test_null_is_as_if_it_were_not_there(run: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text(SETTINGS.replace("output-dir: out", "output-dir: null"), encoding="utf-8")
    assert "output_dir: missing; give --output-dir, or output_dir in a" in refused(capsys, ["train", "c.yaml"])
    Path("c.yaml").write_text(SETTINGS.replace("seed: 7", "seed: null"), encoding="utf-8")
    assert main(["train", "c.yaml"]) == 0
    assert run["seed"] == 42


@pytest.mark.parametrize("name", NEEDED)
def test_what_is_needed_is_named(run: Prepared, capsys: pytest.CaptureFixture[str], name: str) -> None:
    flags = {"plan": "plan.json", "model": "m", "data": "d.jsonl", "output_dir": "out"}
    given = [part for key, value in flags.items() if key != name for part in (f"--{key.replace('_', '-')}", value)]
    assert f"{name}: missing; give --{name.replace('_', '-')}" in refused(capsys, ["train", *given])
    assert not run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--per-device-train-batch-size", "4", "--gradient-accumulation-steps", "4"],
            "per_device_train_batch_size: 4, 4 times accumulated, are 16 rows a step, the plan has 8; solve for",
        ),
        (["--gradient-accumulation-steps", "8"], "gradient_accumulation_steps: 8 times how many rows?"),
        (["--max-length", "9"], "max_length: 9, the plan has 8; profile and solve for it"),
        (["--packing"], "packing: True, the plan has False"),
        (["--bf16"], "bf16: True, the plan has False"),
        (["--trainable", "norm"], "trainable: norm, the plan trains everything; profile and solve for it"),
        (["--trainable", "["], "trainable: '[' is no regular expression"),
        (["--gpu-memory", "4GB"], "gpu_memory: 4GB, the plan has its own; solve for it, or leave it out"),
    ],
)
def test_what_the_plan_was_not_solved_for_is_refused(
    run: Prepared, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in refused(capsys, ["train", "c.yaml", *flags])
    assert not run


def test_the_plan_splits_the_batch_as_it_likes_and_says_so(run: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--per-device-train-batch-size", "4", "--gradient-accumulation-steps", "2", "--no-packing"]
    assert main(["train", "c.yaml", *flags]) == 0
    assert run
    assert "a step of 8 rows goes in 4 times 2, as the plan says" in capsys.readouterr().out


def test_a_dry_run_shows_settings_and_memory_and_trains_nothing(
    run: Prepared, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "c.yaml", "--seed", "9", "--dry-run"]) == 0
    assert not run.has_trained
    settings, table = capsys.readouterr().out.split("┏", 1)
    again = yaml.safe_load(settings)
    assert (again["seed"], again["learning_rate"], again["model"]) == (9, 1e-5, "m")
    assert TrainConfig.model_validate(again).learning_rate == 1e-5
    words = table.split()
    assert all(word in words for word in ("gpu", "host", "3", "4", "5", "6"))
    assert "nvme" not in words
    assert "steps: 3 of 8 rows, 1.5 epochs" in table
