"""Host memory of loading, saving and resuming, measured: no second copy of the model, but where one is planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lazysched.runtime.tensor_reader import SLICE_BYTES
from tests.end_to_end.tiny_folder import make_data, make_model

ROOT = Path(__file__).resolve().parents[2]
SLACK_BYTES = 20_000_000
"""What Python and torch allocate meanwhile: JSON, buffers of files, scratch of an update (4 MB), code that runs first.
The smallest fault that matters, a second copy of the bf16 weights, would be 100 MB."""
NUM_WARM = 6


def program(name: str, *arguments: str | Path) -> dict:
    command = [sys.executable, "-m", f"tests.end_to_end.{name}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 million parameters: 200 MB in fp32 in five files, the largest tensor 33 MB."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 16_000}
    make_model(
        folder / "model", tied=False, max_shard_size="50MB", num_attention_heads=8, num_key_value_heads=8, **shape
    )
    assert len([*(folder / "model").glob("*.safetensors")]) == 5
    return folder / "model"


def check_filling(found: dict) -> None:
    """A tensor in fp32 on its way into weight and correction, and the slice of the file that it comes from."""
    sizes, fill = found["sizes"], found["fill"]
    assert fill["after"] - fill["before"] <= sizes["store"] + SLACK_BYTES
    assert fill["peak"] - fill["after"] <= sizes["tensor"] + SLICE_BYTES + SLACK_BYTES


@pytest.mark.slow
def test_loading_saving_and_resuming_hold_no_second_copy(model: Path, tmp_path: Path) -> None:
    """Nothing is copied where the store lies on the host; from a GPU a shard is, which a test of shards counts."""
    data, output = make_data(tmp_path / "data.jsonl", 10), tmp_path / "out"
    found = program("memory_of_runs", model, data, output, "waiting")
    check_filling(found)
    for window in (found["save"], found["result"]):
        assert window["peak"] - window["before"] <= SLACK_BYTES < found["sizes"]["shard"]
    # The checkpoint alone, as a run that was killed leaves it.
    (output / "checkpoint-2").rename(tmp_path / "checkpoint-2")
    (tmp_path / "cut").mkdir()
    (tmp_path / "checkpoint-2").rename(tmp_path / "cut" / "checkpoint-2")
    resumed = program("memory_of_runs", model, data, tmp_path / "cut", "resume")
    fill = resumed["fill"]
    assert fill["peak"] - fill["after"] <= SLICE_BYTES + SLACK_BYTES
    assert resumed["save"]["peak"] - resumed["save"]["before"] <= SLACK_BYTES


@pytest.mark.slow
def test_saving_beside_training_holds_one_copy_and_gives_it_back(model: Path, tmp_path: Path) -> None:
    found = program("memory_of_runs", model, make_data(tmp_path / "data.jsonl", 10), tmp_path / "out", "beside")
    sizes, save = found["sizes"], found["save"]
    # What steps take for themselves and give back, up to 50 MB seen: the windows begin and end anywhere in one.
    step_bytes = 0.25 * sizes["snapshot"]
    assert 0.9 * sizes["snapshot"] <= save["peak"] - save["before"] <= sizes["snapshot"] + step_bytes + SLACK_BYTES
    assert save["after"] - save["before"] <= step_bytes + SLACK_BYTES
    assert sizes["snapshot"] > 10 * SLACK_BYTES


@pytest.mark.slow
def test_a_real_gguf_file_needs_less_to_be_converted_than_its_store(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Converting holds the whole model in fp32, as README says, but before the store is made, and gives it back."""
    data = tmp_path / "data.jsonl"
    data.write_text((json.dumps({"text": "one and one is two"}) + "\n") * 10)  # its template is longer than the rows
    found = program("memory_of_runs", smollm2_gguf, data, tmp_path / "out", "gguf")
    check_filling(found)
    convert, store_bytes = found["convert"], found["sizes"]["store"]
    assert convert["peak"] - convert["before"] <= store_bytes + found["sizes"]["tensor"] + SLACK_BYTES
    # Half of the model in fp32: transformers' modules stay, the model does not.
    assert convert["after"] - convert["before"] <= 0.2 * store_bytes


@pytest.mark.slow
@pytest.mark.parametrize("way", ["waiting", "beside"])
def test_memory_does_not_grow_with_the_number_of_saves(tmp_path: Path, way: str) -> None:
    """A leak of a twentieth of a checkpoint a save would show; torch's and Python's own heaps grow by a hundredth."""
    model, data = tmp_path / "model", make_data(tmp_path / "data.jsonl", 10)
    make_model(model, hidden_size=128, intermediate_size=512, vocab_size=4000)
    found = program("memory_of_runs", model, data, tmp_path / "out", f"soak-{way}")
    held = np.array(found["held"][NUM_WARM:])
    slope_bytes = np.polyfit(np.arange(len(held)), held, 1)[0]
    assert len(held) == 30
    assert slope_bytes < 0.05 * found["sizes"]["snapshot"], held
