"""Plans, profiles, hardware files, recordings and checkpoints that are damaged, edited wrongly or of another run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from lazysched.runtime.training_state import sha256_of
from tests.bad_input.driver import ESTIMATE, RESUME, SOLVE, TRAIN, Bad, check, parametrized
from tests.bad_input.files import Files, edit

Spoil = Callable[[Files], object]
Change = Callable[[dict[str, Any]], object]
SUMMARY = "{data}: 24 of 24 rows"
EDITED = "the plan was edited since it was simulated"
SIMULATE, EXPLAIN, PLOT = "simulate {plan}", "explain {plan} --time-limit 0", "plot {plan} -o {root}/page.html"
REFINE = "profile --from-run {run} --profile {profile} -o {root}/new.json"


def plan(change: Change) -> Spoil:
    return lambda files: edit(files.plan, change)


def stage(name: str, **changes: Any) -> Spoil:
    """Other decisions for one stage of the plan."""
    return plan(lambda document: document["stages"][name].update(changes))


def profile(change: Change) -> Spoil:
    return lambda files: edit(files.profile, change)


def hardware(change: Change) -> Spoil:
    def rewrite(files: Files) -> None:
        document = yaml.safe_load(files.hardware.read_text())
        change(document)
        files.hardware.write_text(yaml.safe_dump(document))

    return rewrite


def written(name: str, content: str | bytes) -> Spoil:
    return lambda files: (files.root / name).write_bytes(content.encode() if isinstance(content, str) else content)


PLAN_ROWS = (
    Bad("no plan", TRAIN, ("{plan}: no such file", "check the path"), lambda files: files.plan.unlink()),
    Bad("no plan to simulate", SIMULATE, ("{plan}: no such file",), lambda files: files.plan.unlink()),
    Bad("no plan to draw", PLOT, ("{plan}: no such file",), lambda files: files.plan.unlink()),
    Bad("a folder for a plan", EXPLAIN.replace("{plan}", "{model}"), ("{model}: cannot be read",)),
    Bad("an empty plan", TRAIN, ("{plan}: not valid JSON", "make the file again"), written("plan.json", "")),
    Bad("half a plan", SIMULATE, ("{plan}: not valid JSON",), written("plan.json", '{"version": 1, "stages"')),
    Bad("a plan of bytes", EXPLAIN, ("{plan}: cannot be read",), written("plan.json", b"\xff\xfe")),
    Bad("a plan without end", SIMULATE, ("{plan}: not valid JSON",), written("plan.json", "[" * 100000)),
    Bad("a list for a plan", TRAIN, ("{plan}: holds no object",), written("plan.json", "[]")),
    Bad("an empty object for a plan", "compare {plan} {plan}", ("{plan}: model_id: missing",), written("plan.json", "{}")),
    Bad("a profile for a plan", TRAIN.replace("{plan}", "{profile}"), ("{profile}: is a profile, not a plan",)),
    Bad("a hardware file for a plan", SIMULATE.replace("{plan}", "{hardware}"), ("{hardware}: is a hardware file, not a plan",)),
    Bad("a plan of tomorrow", TRAIN, ("{plan}: version: 99", "reads 1"), plan(lambda d: d.update(version=99))),
    Bad("a plan that runs a program", TRAIN.replace("{plan}", "{root}/p.yaml"), ("p.yaml: not valid JSON or YAML", "os.mkdir"),
        written("p.yaml", "!!python/object/apply:os.mkdir [pwned]\n")),
    Bad("an unknown key", SIMULATE, ("{plan}: colour: unknown key",), plan(lambda d: d.update(colour="red"))),
    Bad("an unknown decision", TRAIN, ("stages.block.0.wieghts: unknown key",), stage("block.0", wieghts="gpu")),
    Bad("a field is missing", EXPLAIN, ("{plan}: micro_batch: missing",), plan(lambda d: d.pop("micro_batch"))),
    Bad("rows in words", TRAIN, ("{plan}: micro_batch: is 'two'", "integer"), plan(lambda d: d.update(micro_batch="two"))),
    Bad("rows below 0", TRAIN, ("{plan}: micro_batch: is -2",), plan(lambda d: d.update(micro_batch=-2))),
    Bad("rows that do not multiply", SIMULATE, ("{plan}: batch_size must be",), plan(lambda d: d.update(batch_size=5))),
    Bad("a depth of 0", TRAIN, ("{plan}: prefetch_depth: is 0",), plan(lambda d: d.update(prefetch_depth=0))),
    Bad("a lag below 0", SIMULATE, ("{plan}: d2h_lag: is -1",), plan(lambda d: d.update(d2h_lag=-1))),
    Bad("a norm that is no number", TRAIN, ("{plan}: update.clip_norm: is nan",), plan(lambda d: d["update"].update(clip_norm=float("nan")))),
    Bad("clipping without the norm", TRAIN, ("check_finite false needs clip_norm null",), plan(lambda d: d["update"].update(check_finite=False))),
    Bad("a tier that there is not", TRAIN, ("stages.block.0.weights: is 'tape'",), stage("block.0", weights="tape")),
    Bad("state before weights", SIMULATE, ("stages.embed: state on gpu needs weights on gpu",), stage("embed", weights="host", state="gpu")),
    Bad("weights in files", TRAIN, ("stages.block.0.weights: nvme is not executable yet", "gpu or host"),
        stage("block.0", weights="nvme", state="nvme"), shown=SUMMARY),
    Bad("selective updates", TRAIN, ("update.mode: 'selective' is not executable",),
        plan(lambda d: d["update"].update(mode="selective")), shown=SUMMARY),
    Bad("a segment of two", TRAIN, ("stages.block.0.segment",), stage("block.0", segment=2), shown=SUMMARY),
    Bad("a variant that there is not", SIMULATE, ("stages.block.0.save", "'half' is not among the plan's variants", "--pin 'block[0].save=half'"), stage("block.0", save="half")),
    Bad("a stage too many", SIMULATE, ("stages", "block.9"), plan(lambda d: d["stages"].update({"block.9": d["stages"]["block.0"]}))),
    Bad("a stage is missing", SIMULATE, ("stages", "block.1"), plan(lambda d: d["stages"].pop("block.1"))),
    Bad("no stages", TRAIN, ("stages",), plan(lambda d: d.update(stages={})), shown=SUMMARY),
    Bad("neither variants nor profile", SIMULATE, ("profile: null", "--profile"), plan(lambda d: d.update(variants={}, profile=None))),
    Bad("another model", TRAIN, ("plan: model_id: solved for nobody", "profile and solve"), plan(lambda d: d.update(model_id="nobody")), shown=SUMMARY),
    Bad("another length", TRAIN, ("plan: stages.block.0.save", "bytes of input", "profile and solve again"), plan(lambda d: d.update(seq_len=16)), shown=SUMMARY),
    Bad("any order and full determinism", TRAIN, ("full_determinism does not go with attention cudnn", "--full-determinism"), plan(lambda d: d.update(attention="cudnn", full_determinism=True))),
    Bad("packed bytes without packing", TRAIN, ("packing is false and argument_bytes 5",), plan(lambda d: d.update(argument_bytes=5))),
    Bad("a loss in no tokens", TRAIN, ("{plan}: loss_chunk_tokens: is 0",), plan(lambda d: d.update(loss_chunk_tokens=0))),
    Bad("attention that there is not", TRAIN, ("{plan}: attention: is 'flesh'",), plan(lambda d: d.update(attention="flesh"))),
    Bad("no profile inside", SIMULATE, ("{plan}: profile: null", "--profile"), plan(lambda d: d.update(profile=None))),
    Bad("no profile inside to explain", EXPLAIN, ("{plan}: profile: null",), plan(lambda d: d.update(profile=None))),
    Bad("no profile inside to draw", PLOT, ("profile",), plan(lambda d: d.update(profile=None))),
    Bad("a profile of another model", "simulate {plan} --profile {root}/o.json", ("model_id", "nobody"),
        lambda files: (shutil.copy(files.profile, files.root / "o.json"), edit(files.root / "o.json", lambda d: d.update(model_id="nobody")))),
    Bad("two models to compare", "compare {plan} {root}/o.json", ("model",),
        lambda files: (shutil.copy(files.plan, files.root / "o.json"), edit(files.root / "o.json", lambda d: d.update(model_id="nobody")))),
    Bad("a budget too small for the host", TRAIN, ("host",), plan(lambda d: d["budget_bytes"].update(host=1000)), code=1, shown="warning: the plan needs "),
    Bad("a budget in words", TRAIN, ("{plan}: budget_bytes.gpu: is 'all'",), plan(lambda d: d["budget_bytes"].update(gpu="all"))),
)  # fmt: skip


def first_block(document: dict[str, Any]) -> dict[str, Any]:
    return next(iter(document["variants"]["LlamaDecoderLayer"].values()))[0]


PROFILE_ROWS = (
    Bad("no profile", SOLVE, ("{profile}: no such file",), lambda files: files.profile.unlink()),
    Bad("an empty profile", SOLVE, ("{profile}: not valid JSON",), written("profile.json", "")),
    Bad("a plan for a profile", SOLVE.replace("{profile}", "{plan}"), ("{plan}: is a plan, not a profile",)),
    Bad("a profile of tomorrow", SOLVE, ("{profile}: version: 7",), profile(lambda d: d.update(version=7))),
    Bad("no links", SOLVE, ("links",), profile(lambda d: d.update(links={}))),
    Bad("links in words", SOLVE, ("{profile}: links: is 'fast'",), profile(lambda d: d.update(links="fast"))),
    Bad("a rate below 0", SOLVE, ("{profile}: update.cpu.hybrid8.per_s: is -1",), profile(lambda d: d["update"]["cpu"]["hybrid8"].update(per_s=-1))),
    Bad("a rate of nan", SOLVE, ("{profile}: update.cpu.hybrid8.per_s: is nan",), profile(lambda d: d["update"]["cpu"]["hybrid8"].update(per_s=float("nan")))),
    Bad("no rates", SOLVE, ("profile: update.", "profile again"), profile(lambda d: d.update(update={}))),
    Bad("no stages", SOLVE, ("profile: stages",), profile(lambda d: d.update(stages=[]))),
    Bad("no blocks", SOLVE, ("profile: stages.1",), profile(lambda d: d.update(stages=[d["stages"][0], d["stages"][-1]]))),
    Bad("no variants", SOLVE, ("variants",), profile(lambda d: d.update(variants={}))),
    Bad("bytes below 0", SOLVE, ("{profile}: variants.",), profile(lambda d: first_block(d).update(working_forward_bytes=-1))),
    Bad("a time below 0", SOLVE, ("{profile}: variants.",), profile(lambda d: first_block(d)["forward"].update(median_s=-1))),
    Bad("a time that never ends", SOLVE, ("profile: variants.", "out of range"), profile(lambda d: first_block(d)["forward"].update(median_s=1e300))),
    Bad("a shape of 0", SOLVE, ("profile: stages.block.0.params",), profile(lambda d: d["stages"][1]["params"].update(x=[0]))),
    Bad("memory of 40 digits", SOLVE, ("profile: free_bytes.gpu", "out of range"), profile(lambda d: d["free_bytes"].update(gpu=10**40))),
    Bad("a run without its profile", REFINE, ("{profile}: no such file",), lambda files: files.profile.unlink()),
    Bad("a run of another model", REFINE, ("from_run: model_id", "nobody"), profile(lambda d: d.update(model_id="nobody"))),
    Bad("a recording of nothing", REFINE, ("measured_ops.json", "missing"), written("run/measured_ops.json", "{}")),
    Bad("half a recording", REFINE, ("measured_ops.json: not valid JSON",), written("run/measured_ops.json", '{"durations": [')),
)  # fmt: skip

HARDWARE_ROWS = (
    Bad("no hardware file", ESTIMATE, ("{hardware}: no such file",), lambda files: files.hardware.unlink()),
    Bad("an empty hardware file", ESTIMATE, ("{hardware}: holds no object",), written("machine.yaml", "")),
    Bad("a profile for a hardware file", ESTIMATE.replace("{hardware}", "{profile}"), ("{profile}: is a profile, not a hardware file",)),
    Bad("a program for a hardware file", ESTIMATE, ("{hardware}: not valid JSON or YAML",), written("machine.yaml", "!!python/object/apply:os.mkdir [pwned]\n")),
    Bad("a figure without source", ESTIMATE, ("{hardware}: gpu_memory_bytes", "needs its source"), hardware(lambda d: d["gpu_memory_bytes"].update(source=None))),
    Bad("a figure in words", ESTIMATE, ("{hardware}: gpu_memory_bytes.value: is 'big'",), hardware(lambda d: d["gpu_memory_bytes"].update(value="big"))),
    Bad("a figure below 0", ESTIMATE, ("{hardware}: gpu_memory_bytes.value: is -1",), hardware(lambda d: d["gpu_memory_bytes"].update(value=-1))),
    Bad("a figure too many", ESTIMATE, ("{hardware}: warp_speed: unknown key",), hardware(lambda d: d.update(warp_speed={"value": 1}))),
    Bad("a figure is missing", ESTIMATE, ("{hardware}: matmul_flop_per_s: missing",), hardware(lambda d: d.pop("matmul_flop_per_s"))),
    Bad("no config.json to estimate for", ESTIMATE.replace("{model}/config.json", "{root}/no.json"), ("{root}/no.json: no such file",)),
    Bad("a folder without one", ESTIMATE.replace("{model}/config.json", "{root}"), ("{root}/config.json: no such file",)),
    Bad("weights for a config.json", ESTIMATE.replace("config.json", "model.safetensors"), ("an estimate needs a config.json",)),
)  # fmt: skip


def state(name: str, content: str | bytes) -> Spoil:
    """Another file in the checkpoint, with a manifest that agrees."""

    def rewrite(files: Files) -> None:
        path = files.checkpoint / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        _agree(path)

    return rewrite


def _agree(path: Path) -> None:
    """The manifest says what the file is now."""
    entry = {"num_bytes": path.stat().st_size, "sha256": sha256_of(path)}
    edit(path.parent / "manifest.json", lambda manifest: manifest["files"].update({path.name: entry}))


def manifest(change: Change) -> Spoil:
    return lambda files: edit(files.checkpoint / "manifest.json", change)


def listed(name: str) -> Spoil:
    """A manifest that names one more file, which exists outside of the folder."""

    def add(files: Files) -> None:
        (files.root / "secret").write_text("years of work")
        edit(files.checkpoint / "manifest.json", lambda d: d["files"].update({name: {"num_bytes": 13, "sha256": "0"}}))

    return add


def training(change: Change) -> Spoil:
    """Another training state, with a manifest that agrees."""
    return lambda files: (
        edit(files.checkpoint / "training_state.json", change),
        _agree(files.checkpoint / "training_state.json"),
    )


def tensors(name: str, change: Callable[[dict[str, Any]], object]) -> Spoil:
    def rewrite(files: Files) -> None:
        path = next(files.checkpoint.glob(name))
        found = load_file(path)
        change(found)
        save_file(found, path)
        _agree(path)

    return rewrite


def linked(files: Files) -> None:
    """A file of the checkpoint is a link to the same bytes elsewhere."""
    path = files.checkpoint / "training_state.json"
    path.rename(files.root / "elsewhere")
    path.symlink_to(files.root / "elsewhere")


def flipped(files: Files) -> None:
    path = next(files.checkpoint.glob("model*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


SKIPPED = "skipped {checkpoint}"
FROM = RESUME.replace("--resume", "--resume-from-checkpoint {checkpoint}")
OTHER = "resume: {run} holds no valid checkpoint"
CHECKPOINT_ROWS = (
    Bad("no such checkpoint", FROM, ("{checkpoint}: no such checkpoint", "check the path"), lambda files: shutil.rmtree(files.checkpoint)),
    Bad("no manifest", FROM, ("{checkpoint}: has no manifest.json", "use another"), lambda files: (files.checkpoint / "manifest.json").unlink()),
    Bad("no valid one", RESUME, (OTHER, "leave --resume out"), lambda files: (files.checkpoint / "manifest.json").unlink(), shown=SKIPPED),
    Bad("a manifest of nothing", FROM, ("manifest.json: has_state: missing",), written("run/checkpoint-2/manifest.json", "{}")),
    Bad("half a manifest", FROM, ("manifest.json: not valid JSON",), written("run/checkpoint-2/manifest.json", '{"files"')),
    Bad("a manifest of tomorrow", FROM, ("manifest.json: version: 5",), manifest(lambda d: d.update(version=5))),
    Bad("a manifest that leads up", FROM, ("manifest.json", "'../../secret' is not the name of a file"), listed("../../secret")),
    Bad("a manifest that leads to the root", FROM, ("manifest.json", "'/etc/passwd' is not the name of a file"), listed("/etc/passwd")),
    Bad("a manifest with another slash", FROM, ("is not the name of a file",), listed("..\\secret")),
    Bad("a manifest of the folder", FROM, ("'..' is not the name of a file",), listed("..")),
    Bad("a manifest of a link", FROM, ("training_state.json: is a link",), linked),
    Bad("a file is missing", FROM, ("is missing, though the manifest lists it",), lambda files: next(files.checkpoint.glob("model*.safetensors")).unlink()),
    Bad("a file is shorter", FROM, ("bytes, the manifest says",), lambda files: next(files.checkpoint.glob("model*.safetensors")).write_bytes(b"12")),
    Bad("a bit has flipped", FROM, ("its contents are not those",), flipped),
    Bad("a model alone", FROM, ("{checkpoint}: keeps the model without optimizer state",), manifest(lambda d: d.update(has_state=False))),
    Bad("a state of nothing", FROM, ("training_state.json: step: missing",), state("training_state.json", "{}")),
    Bad("a state without end", FROM, ("training_state.json: not valid JSON",), state("training_state.json", "[" * 100000)),
    Bad("a step below 0", FROM, ("training_state.json: step: is -1",), training(lambda d: d.update(step=-1))),
    Bad("a step in words", FROM, ("training_state.json: step: is 'two'",), training(lambda d: d.update(step="two"))),
    Bad("a log that is no JSON", FROM, ("log.jsonl: holds a row that is no step",), state("log.jsonl", "{\n")),
    Bad("a log of no text", FROM, ("log.jsonl: holds a row that is no step",), state("log.jsonl", b"\xff")),
    Bad("a log of another length", FROM, ("log.jsonl: has 0 rows of 2 steps",), state("log.jsonl", "")),
    Bad("a log of other columns", FROM, ("log.jsonl: holds a row that is no step",), state("log.jsonl", '{"step": 0}\n{"step": 1}\n')),
    Bad("weights of another shape", FROM, ("model.norm.weight", "use the plan"), tensors("model*.safetensors", lambda d: d.update({"model.norm.weight": d["model.norm.weight"][:3].clone()})), shown="resuming from {checkpoint}"),
    Bad("weights without one", FROM, ("model.norm.weight: missing",), tensors("model*.safetensors", lambda d: d.pop("model.norm.weight")), shown="resuming from {checkpoint}"),
    Bad("weights that are no file of theirs", FROM, ("truncated or damaged",), state("model.safetensors", "x"), shown="resuming from {checkpoint}"),
    Bad("another seed", f"{FROM} --seed 5", ("seed: 5", "made with 42", "--seed 42"), shown="resuming from {checkpoint}"),
    Bad("other data", FROM.replace("{data}", "{sums}"), ("data: ", "was made with", "--data"), shown="resuming from {checkpoint}"),
    Bad("fewer steps than there were", FROM.replace("--max-steps 4", "--max-steps 1"), ("max_steps: 1 is less than the 2 steps", "--max-steps 2"), shown="resuming from {checkpoint}"),
    Bad("another plan", FROM, ("batch_size: 2", "made with 4"), plan(lambda d: d.update(batch_size=2, accumulation=d["accumulation"] // 2)), shown=EDITED),
)  # fmt: skip


@parametrized(PLAN_ROWS)
def test_bad_plans(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


@parametrized(PROFILE_ROWS)
def test_bad_profiles(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


@parametrized(HARDWARE_ROWS)
def test_bad_hardware_files(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


@parametrized(CHECKPOINT_ROWS)
def test_bad_checkpoints(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


def test_the_checkpoint_is_good_otherwise(files: Files) -> None:
    assert json.loads((files.checkpoint / "training_state.json").read_text())["step"] == 2
