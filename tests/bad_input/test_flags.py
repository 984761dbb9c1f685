"""Flags and arguments that are wrong, and places that cannot be written, for every command."""

from __future__ import annotations

import pytest

from tests.bad_input.driver import ESTIMATE, EVALUATE, PREPARE, PROFILE, RESUME, SOLVE, TRAIN, Bad, check, parametrized
from tests.bad_input.files import Files

PREVIEW = PREPARE.replace("prepare", "preview")
SUMMARY = "{data}: 24 of 24 rows"
"""What ``train`` shows once the data are read."""


def a_file_at(name: str) -> object:
    return lambda files: (files.root / name).write_text("years of work")


def a_folder_at(name: str) -> object:
    return lambda files: (files.root / name).mkdir()


FLAGS = (
    Bad("no such command", "tarin", ("No such command 'tarin'",)),
    Bad("no such flag", f"{TRAIN} --learning-rat 1", ("--learning-rat", "--learning-rate")),
    Bad("code of a model", f"{TRAIN} --trust-remote-code", ("No such option: --trust-remote-code",)),
    Bad("no plan to look at", "explain", ("PLAN", "--help")),
    Bad("one plan to compare", "compare {plan}", ("PLAN_B", "--help")),
    Bad("steps in words", TRAIN.replace("--max-steps 2", "--max-steps two"), ("--max-steps", "'two'")),
    Bad("no steps", TRAIN.replace("--max-steps 2", "--max-steps 0"), ("--max-steps", "not '0'", "or equal to 1")),
    Bad("steps below 0", TRAIN.replace("--max-steps 2", "--max-steps -3"), ("--max-steps", "not '-3'")),
    Bad("learning rate not a number", f"{TRAIN} --learning-rate nan", ("learning-rate", "nan")),
    Bad("a billion steps and one", f"{TRAIN} --max-steps 1000000001", ("max_steps: 1000000001", "1000000000")),
    Bad("unknown schedule", f"{TRAIN} --lr-scheduler-type step", ("--lr-scheduler-type", "'step'", "linear")),
    Bad("unknown device", f"{TRAIN} --device tpu", ("--device", "'tpu'", "cuda")),
    Bad("no GPU to train on", f"{TRAIN} --device cuda", ("device: cuda is not available here", "--device cpu")),
    Bad("no GPU to profile", PROFILE.replace("cpu", "cuda"), ("device: cuda is not available here",)),
    Bad("no GPU to evaluate on", EVALUATE.replace("cpu", "cuda"), ("device: cuda is not available here",)),
    Bad("no tokens a row", PROFILE.replace("8", "0"), ("--seq-len", "0", "or equal to 1")),
    Bad("no rows", PROFILE.replace("--micro-batch 1", "--micro-batch 0"), ("--micro-batch", "0", "or equal to 1")),
    Bad("pin limit below 0", f"{PROFILE} --pin-limit -1GB", ("--pin-limit", "'-1GB' is not a size", "24GB")),
    Bad("no folder to measure", f"{PROFILE} --storage {{root}}/nowhere", ("storage", "{root}/nowhere", "folder")),
    Bad("a file to measure", f"{PROFILE} --storage {{data}}", ("storage", "{data}", "folder")),
    Bad("no model to profile", "profile -o {root}/new.json", ("MODEL: missing", "--from-run")),
    Bad("a run alone", "profile --from-run {run} -o {root}/new.json", ("--profile: missing",)),
    Bad(
        "no such run", "profile --from-run {root}/nowhere --profile {profile} -o {root}/new.json",
        ("from_run: {root}/nowhere", "--output-dir"),
    ),
    Bad(
        "a run without times", "profile --from-run {model} --profile {profile} -o {root}/new.json",
        ("from_run: {model} has no", "train at least 3 steps"),
    ),
    Bad("a model without a model", f"{PROFILE} --hardware-only", ("MODEL: means nothing with --hardware-only",)),
    Bad("no profile", "solve --batch-size 4 -o {root}/new.json", ("PROFILE: missing", "--hardware")),
    Bad("no batch size", "solve {profile} -o {root}/new.json", ("--batch-size", "--help")),
    Bad("batch size in words", SOLVE.replace("4", "many"), ("--batch-size: 'many' is no number of rows", "auto")),
    Bad("no rows a step", SOLVE.replace("4", "0"), ("--batch-size: '0'", "1 or more")),
    Bad("half a row", SOLVE.replace("4", "1.5"), ("--batch-size: '1.5'",)),
    Bad("rows that no micro-batch divides", SOLVE.replace("4", "5"), ("5", "micro-batch", "2")),
    Bad("rows of 18 digits", SOLVE.replace("4", "2" + "0" * 17), ("batch_size",)),
    Bad("rows of 5000 digits", SOLVE.replace("4", "9" * 5000), ("--batch-size",)),
    Bad("rows of 30 digits", SOLVE.replace("4", "2" + "0" * 30), ("--batch-size", "no number of rows")),
    Bad("memory in no unit", f"{SOLVE} --gpu-memory 24XB", ("--gpu-memory: '24XB' is not a size", "24GB")),
    Bad("memory without unit", f"{SOLVE} --host-memory 24", ("--host-memory: '24' is not a size; write 24B for bytes, or for example 24GB",)),
    Bad("no memory", f"{SOLVE} --gpu-memory 0", ("gpu_memory: 0 bytes is no budget",)),
    Bad("too little memory", f"{SOLVE} --gpu-memory 1KB", ("gpu", "--gpu-memory"), code=1),
    Bad("no time to solve", f"{SOLVE} --time-limit 0", ("time_limit_s: 0:", "positive")),
    Bad("time that is no number", f"{SOLVE} --time-limit nan", ("time-limit", "nan")),
    Bad("gap of 1", f"{SOLVE} --gap 1", ("gap: 1:", "from 0 up to")),
    Bad("gap that is no number", f"{SOLVE} --gap nan", ("gap", "nan")),
    Bad("a norm that is no number", f"{SOLVE} --max-grad-norm nan", ("max-grad-norm", "nan")),
    Bad("seed of the solver", f"{SOLVE} --seed 4000000000", ("seed: 4000000000", "2147483647")),
    Bad("unknown state", f"{SOLVE} --optimizer-state int4", ("--optimizer-state", "'int4'", "hybrid8")),
    Bad("files nowhere", f"{SOLVE} --nvme 1GB --nvme-dir {{root}}/nowhere", ("--nvme-dir: {root}/nowhere", "make it")),
    Bad("files in a file", f"{SOLVE} --nvme 1GB --nvme-dir {{data}}", ("--nvme-dir: {data}: no such folder",)),
    Bad("a folder for no files", f"{SOLVE} --nvme-dir {{root}}", ("--nvme-dir: {root}", "--nvme 200GB")),
    Bad("more files than room", f"{SOLVE} --nvme 900000TB --nvme-dir {{root}}", ("--nvme", "free in {root}")),
    Bad("a pin without value", f"{SOLVE} --pin block[0:1].weights", ("pin", "block[0:1].weights", "=")),
    Bad("a pin of nothing", f"{SOLVE} --pin layer.0.weights=gpu", ("pin", "layer.0", "block")),
    Bad("a pin of no decision", f"{SOLVE} --pin block.0.colour=red", ("pin", "colour")),
    Bad("a pin to nowhere", f"{SOLVE} --pin block.0.weights=tape", ("pin", "tape", "gpu")),
    Bad("a pin beyond the last block", f"{SOLVE} --pin block.99.weights=gpu", ("pin", "block.99")),
    Bad("a sweep of nothing", f"{SOLVE} --sweep gpu-memory", ("--sweep", "gpu-memory", "8GB:80GB:8GB")),
    Bad("a sweep of colours", f"{SOLVE} --sweep colour=1GB:2GB:1GB", ("--sweep", "colour", "gpu-memory")),
    Bad("a sweep backwards", f"{SOLVE} --sweep gpu-memory=9GB:1GB:1GB", ("--sweep", "9")),
    Bad("a sweep without steps", f"{SOLVE} --sweep gpu-memory=1GB:9GB:0GB", ("--sweep", "0GB")),
    Bad("a sweep that never ends", f"{SOLVE} --sweep gpu-memory=1GB:900000TB:1B", ("--sweep", "at most 200", "larger step")),
    Bad(
        "a sweep and a budget", f"{SOLVE} --gpu-memory 1GB --sweep gpu-memory=1GB:2GB:1GB",
        ("--gpu-memory: means nothing where --sweep sets it",),
    ),
    Bad(
        "a sweep of batches", SOLVE.replace("4", "auto") + " --sweep gpu-memory=1GB:2GB:1GB",
        ("--batch-size: auto means nothing with --sweep",),
    ),
    Bad("unknown machine", "solve --hardware rtx409 --model x --batch-size 1 -o {root}/n.json", ("rtx4090", "library")),
    Bad("a machine alone", "solve --hardware rtx4090 --batch-size 1 -o {root}/n.json", ("--model: missing",)),
    Bad("a machine beside a profile", f"{SOLVE} --hardware rtx4090", ("--hardware: means nothing beside PROFILE",)),
    Bad("time to explain", "explain {plan} --time-limit nan", ("time-limit", "nan")),
    Bad("another profile", "simulate {plan} --profile {root}/nowhere.json", ("{root}/nowhere.json", "no such file")),
    Bad("rows that are no range", f"{PREVIEW} --rows 5", ("--rows: '5' is not a range", "3:5")),
    Bad("rows of 5000 digits to look at", f"{PREVIEW} --rows 1:{'9' * 5000}", ("--rows", "3:5")),
    Bad("a pin of 5000 digits", f"{SOLVE} --pin block[{'9' * 5000}].weights=gpu", ("pin", "is not a range")),
    Bad("seed of random weights", f"{TRAIN} --init random --seed {2**64}", ("seed", "too large"), shown=SUMMARY),
    Bad("rows beyond the last", f"{PREVIEW} --rows 100:200", ("rows", "24")),
    Bad("no rows to count", f"{EVALUATE} --max-rows 0", ("--max-rows", "or equal to 1")),
    Bad("answers of no tokens", f"{EVALUATE} --max-new-tokens 0", ("--max-new-tokens", "or equal to 1")),
    Bad("doctor of nowhere", "doctor --dir {root}/nowhere", ("--dir: {root}/nowhere is no folder", "make it")),
    Bad("doctor of no model", "doctor --model {root}", ("--model: {root} holds no config.json",)),
    Bad("steps that are not run", f"{TRAIN} --trace t.json --trace-steps 7:9", ("trace_steps: 7:9",), shown=SUMMARY),
    Bad("a seed that is too long", f"{TRAIN} --seed {2**63}", ("seed", "too large"), shown=SUMMARY),
)  # fmt: skip

PLACES = (
    Bad("profile below a file", PROFILE.replace("{root}", "{data}"), ("--output: {data}/new.json", "make it first")),
    Bad("profile into no folder", PROFILE.replace("{root}", "{root}/no"), ("--output: {root}/no/new.json", "make it")),
    Bad("profile onto a folder", PROFILE.replace("{root}/new.json", "{model}"), ("--output: {model} is a folder",)),
    Bad("plan into no folder", SOLVE.replace("{root}", "{root}/no"), ("--output: {root}/no/new.json", "make it")),
    Bad("plan onto a folder", SOLVE.replace("{root}/new.json", "{model}"), ("--output: {model} is a folder",)),
    Bad("page into no folder", "plot {plan} -o {root}/no/page.html", ("--output: {root}/no/page.html", "make it")),
    Bad("page with the name of a picture", "plot {plan} -o {root}/plan.png", ("plan.png: an HTML page", "plan.html")),
    Bad("page onto a folder", "plot {plan} -o {model}", ("--output: {model} is a folder", "name a file")),
    Bad("answers into no folder", f"{EVALUATE} -o {{root}}/no/a.jsonl", ("--output: {root}/no/a.jsonl", "make it")),
    Bad("timeline into no folder", "simulate {plan} --trace {root}/no/t.json", ("--trace: {root}/no/t.json", "make it")),
    Bad("timeline onto a folder", "simulate {plan} --trace {model}", ("--trace: {model} is a folder",)),
    Bad("trace into no folder", f"{TRAIN} --trace {{root}}/no/t.json", ("trace", "{root}/no", "make it")),
    Bad("trace onto a folder", f"{TRAIN} --trace {{model}}", ("trace", "{model}", "name a file")),
    Bad("trace into the result", f"{TRAIN} --trace {{out}}/t.json", ("trace", "{out}")),
    Bad("result into no folder", TRAIN.replace("{out}", "{root}/no/out"), ("{root}/no/out", "make it")),
    Bad("result onto a file", TRAIN.replace("{out}", "{data}"), ("{data}: is a file", "name a folder")),
    Bad("result below a file", TRAIN.replace("{out}", "{data}/out"), ("{data}/out", "make it")),
    Bad(
        "result among others' files", TRAIN, ("{out}: holds 'thesis.txt'", "new or empty"),
        lambda files: (files.output.mkdir(), (files.output / "thesis.txt").write_text("years of work")),
    ),
    Bad("result into the folder that one is in", TRAIN.replace("{out}", "{root}"), ("output_dir: is", "you are in", "another")),
    Bad("result onto an earlier run", TRAIN.replace("{out}", "{run}"), ("{run} holds checkpoint-2", "--resume")),
    Bad("a name that is too long", TRAIN.replace("{out}", "{root}/" + "x" * 300), ("x" * 300,), code=1),
    Bad("a name with a null", PROFILE.replace("new.json", "\0"), ("--output", "null")),
    Bad(
        "tokens below a file", PREPARE + " --cache-dir {data}/tokens",
        ("{data}/tokens: cannot be made", "name another folder"),
    ),
    Bad("nothing to go on from", RESUME.replace("{run}", "{out}"), ("resume: {out} holds no valid checkpoint",)),
    Bad("an estimate onto a folder", ESTIMATE.replace("{root}/new.json", "{model}"), ("{model} is a folder",)),
)  # fmt: skip


LOST = "and would be lost; name another file"
INPUTS = (
    Bad("a timeline onto its plan", "simulate {plan} --trace {plan}", ("--trace: {plan}: is read as PLAN", LOST)),
    Bad(
        "a timeline onto its profile", "simulate {plan} --profile {profile} --trace {root}/model/../profile.json",
        ("--trace: {root}/model/../profile.json: is read as --profile", LOST),
    ),
    Bad("a plan onto its profile", SOLVE.replace("{root}/new.json", "{profile}"), ("{profile}: is read as PROFILE", LOST)),
    Bad(
        "a plan onto a link to its profile", SOLVE.replace("new.json", "link.json"), ("link.json: is read as PROFILE", LOST),
        lambda files: (files.root / "link.json").symlink_to("profile.json"),
    ),
    Bad(
        "a plan onto its profile by the working folder", SOLVE.replace("{root}/new.json", "./profile.json"),
        ("--output: profile.json: is read as PROFILE", LOST),
    ),
    Bad(
        "a table onto its profile",
        "solve {root}/p.csv --batch-size 4 --sweep gpu-memory=1GB:2GB:1GB -o {root}/p.json",
        ("--output: {root}/p.csv: is read as PROFILE", LOST),
        lambda files: (files.root / "p.csv").write_bytes(files.profile.read_bytes()),
    ),
    Bad("a plan onto its machine", ESTIMATE.replace("{root}/new.json", "{hardware}"), ("is read as --hardware", LOST)),
    Bad("a plan onto its model", ESTIMATE.replace("{root}/new.json", "{model}/config.json"), ("is read as --model", LOST)),
    Bad("a page onto its plan", "plot {plan} -o {plan}", ("--output: {plan}: is read as PLAN", LOST)),
    Bad("a page onto its profile", "plot {plan} --profile {profile} -o {profile}", ("is read as --profile", LOST)),
    Bad("a page onto the log", "report {run} -o {run}/log.jsonl", ("{run}/log.jsonl: is read as OUTPUT_DIR", LOST)),
    Bad("a profile onto its model", PROFILE.replace("{root}/new.json", "{model}/config.json"), ("is read as MODEL", LOST)),
    Bad(
        "a profile onto what it refines", "profile --from-run {run} --profile {profile} -o {profile}",
        ("{profile}: is read as --profile", LOST),
    ),
    Bad(
        "a profile onto what a run took", "profile --from-run {run} --profile {profile} -o {run}/measured_ops.json",
        ("is read as --from-run", LOST),
    ),
    Bad("answers onto the questions", f"{EVALUATE} -o {{sums}}", ("--output: {sums}: is read as --data", LOST)),
    Bad(
        "answers onto registered questions",
        f"{EVALUATE} -o {{sums}}".replace("--data {sums}", "--data {root}:sums"), ("is read as --data", LOST),
        lambda files: (files.root / "dataset_info.json").write_text('{"sums": {"file_name": "sums.jsonl"}}'),
    ),
    Bad("answers onto the weights", f"{EVALUATE} -o {{model}}/model.safetensors", ("is read as --model", LOST)),
    Bad("a trace onto the plan", f"{TRAIN} --trace {{plan}}", ("trace: {plan}: is read as plan", LOST)),
    Bad("a trace onto the data", f"{TRAIN} --trace {{data}}", ("trace: {data}: is read as data", LOST)),
    Bad("result onto the model", TRAIN.replace("{out}", "{model}"), ("output_dir: {model}: is read as model", "another folder")),
    Bad(
        "a plan of its own onto the data", TRAIN.replace("--plan {plan} ", "").replace("{data}", "{root}/out-plan.json"),
        ("output_dir: {root}/out-plan.json: is read as data", LOST),
        lambda files: (files.root / "out-plan.json").write_text("years of work"),
    ),
)  # fmt: skip


@parametrized(INPUTS)
def test_outputs_that_are_inputs(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


@parametrized(FLAGS)
def test_bad_flags(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


@parametrized(PLACES)
def test_bad_places(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)
