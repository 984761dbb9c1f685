"""Writing and reading checkpoints: the same weights come back, and a failure leaves nothing half-written."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lazysched.errors import RunError, UsageError
from lazysched.runtime.checkpoint import check_output_dir, write_folder
from lazysched.runtime.folders import MANIFEST, new_folder
from lazysched.runtime.sources import resolve_model
from lazysched.runtime.tensor_reader import TensorReader, read_tensor_into


def tiny_model(tied: bool, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=dtype)


def write_model(model: LlamaForCausalLM, folder: Path, max_shard_bytes: int = 10**9, **options: Any) -> None:
    tensors = dict(model.named_parameters())
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    fetch = {name: tensor.detach() for name, tensor in tensors.items()}.__getitem__
    write_folder(folder, model.config, shapes, fetch, model.dtype, max_shard_bytes=max_shard_bytes, **options)


def siblings(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.parent.iterdir())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 10_000])
def test_from_pretrained_gives_the_same_weights(
    tmp_path: Path, tied: bool, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    model = tiny_model(tied, dtype)
    write_model(model, tmp_path / "out", max_shard_bytes)
    result: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    loaded, report = result
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(loaded) is LlamaForCausalLM
    assert loaded.dtype == dtype  # from config.json, which must agree with the tensors
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert siblings(tmp_path / "out") == ["out"]


def test_shards_are_filled_in_order_and_keep_to_their_size(tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    write_model(model, tmp_path / "out", max_shard_bytes=13_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == [name for name, _ in model.named_parameters()]
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    sizes = dict.fromkeys(files, 0)
    for name, parameter in model.named_parameters():
        sizes[tmp_path / "out" / index["weight_map"][name]] += parameter.nbytes
    assert max(sizes.values()) <= 13_000
    first = {
        file: next(p.nbytes for n, p in model.named_parameters() if index["weight_map"][n] == file.name)
        for file in files
    }
    assert all(sizes[file] + first[after] > 13_000 for file, after in itertools.pairwise(files))


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    write_model(tiny_model(tied=False), tmp_path / "out", max_shard_bytes=1)
    weight_map = resolve_model(str(tmp_path / "out")).weight_files
    assert len(set(weight_map.values())) == len(weight_map)


def test_the_callers_config_is_left_alone(tmp_path: Path) -> None:
    model = tiny_model(tied=False, dtype=torch.bfloat16)
    model.config.dtype, model.config.architectures = torch.float32, None
    write_model(model, tmp_path / "out")
    assert (model.config.dtype, model.config.architectures) == (torch.float32, None)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["dtype"], written["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])


def test_tokenizer_template_and_generation_config_come_along_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    carried = ["tokenizer.json", "tokenizer.model", "chat_template.jinja", "generation_config.json", "merges.txt"]
    for name in [*carried, "notes.md", "pytorch_model.bin", "config.json", "model.safetensors"]:
        (source / name).write_text(f"{{}} {name}")
    write_model(tiny_model(tied=True), tmp_path / "out", source_dir=source, extra_files={"plan.json": "{}\n"})
    written = {entry.name for entry in (tmp_path / "out").iterdir()}
    assert written == {*carried, "plan.json", "config.json", "model.safetensors", MANIFEST}
    assert all((tmp_path / "out" / name).read_text() == f"{{}} {name}" for name in carried)


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_failure_in_the_second_shard_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    fetched: list[str] = []

    def fetch(name: str) -> torch.Tensor:
        fetched.append(name)
        if name == "b":
            raise error
        return tensors[name]

    shapes = [(name, (4,)) for name in tensors]
    with pytest.raises(type(error)):
        write_folder(tmp_path / "out", LlamaConfig(), shapes, fetch, torch.float32, max_shard_bytes=16)
    assert fetched == ["a", "b"]
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_earlier_result(tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    write_model(model, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(KeyError):
        write_folder(tmp_path / "out", model.config, [("x", (1,))], {}.__getitem__, torch.float32)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert siblings(tmp_path / "out") == ["out"]


def test_our_own_folder_is_replaced_whole(tmp_path: Path) -> None:
    write_model(tiny_model(tied=False), tmp_path / "out", max_shard_bytes=10_000)
    write_model(tiny_model(tied=True), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", MANIFEST}
    assert siblings(tmp_path / "out") == ["out"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_model(tiny_model(tied=True), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_files_of_others_are_never_replaced(tmp_path: Path) -> None:
    write_model(tiny_model(tied=True), tmp_path / "out")
    (tmp_path / "out" / "thesis.md").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'thesis.md'.*new or empty"):
        write_model(tiny_model(tied=False), tmp_path / "out")
    assert (tmp_path / "out" / "thesis.md").read_text() == "mine"


def test_a_file_that_appears_during_the_run_costs_neither_it_nor_the_result(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def work() -> None:
        with new_folder(target) as folder:
            (folder / "weights").write_text("hours of work")
            target.mkdir()
            (target / "log").write_text("mine")

    with pytest.raises(RunError, match=r"holds 'log'.*the result is in .*out-2"):
        work()
    assert (target / "log").read_text() == "mine"
    assert (tmp_path / "out-2" / "weights").read_text() == "hours of work"
    assert siblings(target) == ["out", "out-2"]


def test_what_a_killed_process_left_is_cleared_away_but_not_the_work_of_a_live_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from lazysched.runtime.folders import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], cwd=tmp_path, check=False)
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".out.tmp-")
    with new_folder(tmp_path / "out") as alive:
        assert not leftover.exists()
        monkeypatch.setattr(os, "getpid", lambda: 0)  # a second process, as far as names go
        with new_folder(tmp_path / "out") as folder:
            (folder / "whole").write_text("x")
        assert siblings(alive) == [alive.name, "out"]
    assert siblings(alive) == ["out"]


def test_a_swap_cut_between_its_renames_is_undone(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as folder:
        (folder / "first").write_text("x")
    (tmp_path / "out").rename(tmp_path / ".out.old-1")
    with pytest.raises(KeyError), new_folder(tmp_path / "out"):
        raise KeyError
    assert (tmp_path / "out" / "first").is_file()
    assert siblings(tmp_path / "out") == ["out"]


@pytest.mark.parametrize("num_elements", [2_500, 100_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, num_elements: int) -> None:
    tensor, config = torch.ones(num_elements), LlamaConfig()
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, earlier[1]))  # a limit on files fails as a full disk does
    try:
        with pytest.raises(RunError, match="free disk space") as caught:
            write_folder(tmp_path / "out", config, [("a", (num_elements,))], lambda name: tensor, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_output_dir_is_checked_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    check_output_dir(tmp_path / "new")
    with pytest.raises(UsageError, match=r"the folder .*absent does not exist; make it"):
        check_output_dir(tmp_path / "absent" / "new")
    with pytest.raises(UsageError, match="is a file"):
        check_output_dir(tmp_path / "file")
    with pytest.raises(UsageError, match="holds 'a'"):
        check_output_dir(tmp_path / "full")
    with pytest.raises(UsageError, match=r"1e\+06 TB will be written and .* are free"):
        check_output_dir(tmp_path / "new", 10**18)
    with pytest.raises(UsageError, match="mount point"):
        check_output_dir(Path("/"))


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_reading_converts_like_torch(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    values = torch.randn(7, 5, dtype=torch.float64).to(stored)
    save_file({"a": values}, tmp_path / "x.safetensors")
    buffer = torch.full((100,), -1.0, dtype=wanted)
    read_tensor_into({"a": tmp_path / "x.safetensors"}, "a", buffer[3:38].view(7, 5))
    assert torch.equal(buffer[3:38].view(7, 5), values.to(wanted))
    assert torch.equal(buffer[[*range(3), *range(38, 100)]], torch.full((65,), -1.0, dtype=wanted))


@pytest.mark.parametrize("slice_bytes", [1, 40, 60, 10**6])
def test_reading_in_slices_gives_all_rows(tmp_path: Path, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazysched.runtime.tensor_reader.SLICE_BYTES", slice_bytes)
    tensors = {"a": torch.randn(11, 5), "b": torch.randn(13), "c": torch.tensor(2.5), "d": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors")
    with TensorReader(dict.fromkeys(tensors, tmp_path / "x.safetensors")) as reader:
        for name, tensor in tensors.items():
            destination = torch.full_like(tensor, -1)
            reader.read_into(name, destination)
            assert torch.equal(destination, tensor), name
            assert reader.shape(name) == tuple(tensor.shape)


def test_reading_names_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2, 3), "q": torch.ones(2, dtype=torch.int8)}, path)
    with TensorReader({"a": path, "q": path}) as reader:
        with pytest.raises(UsageError, match=r"a: shape \(2, 3\) does not fit \(3, 2\)"):
            reader.read_into("a", torch.empty(3, 2))
        with pytest.raises(UsageError, match="b: missing in the checkpoint"):
            reader.read_into("b", torch.empty(3, 2))
        with pytest.raises(UsageError, match="q: stored as I8, and quantised weights cannot be trained"):
            reader.read_into("q", torch.empty(2))


LOADING = """
import sys, torch
from pathlib import Path
from lazysched.runtime.tensor_reader import TensorReader
from lazysched.runtime.machine import peak_rss_bytes, rss_bytes
files = {name: Path(sys.argv[1]) for name in sys.argv[3:]}
buffer = torch.zeros(int(sys.argv[2]), dtype=torch.float32)
before = rss_bytes()
with TensorReader(files) as reader:
    start = 0
    for name in files:
        shape = reader.shape(name)
        size = shape[0] * shape[1]
        reader.read_into(name, buffer[start:start + size].view(shape))
        start += size
print(peak_rss_bytes() - before, float(buffer.sum()))
"""


@pytest.mark.parametrize(("num_tensors", "rows"), [(1, 50_000), (200, 250)])
def test_loading_needs_the_buffer_and_little_more(tmp_path: Path, num_tensors: int, rows: int) -> None:
    tensors = {f"t{i}": torch.ones(rows, 1000) for i in range(num_tensors)}
    num_elements = sum(tensor.numel() for tensor in tensors.values())
    assert num_elements * 4 == 200_000_000
    save_file(tensors, tmp_path / "x.safetensors")
    command = [sys.executable, "-c", LOADING, str(tmp_path / "x.safetensors"), str(num_elements), *tensors]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    extra_bytes, total = done.stdout.split()
    assert float(total) == num_elements
    assert int(extra_bytes) < 80_000_000
