"""The documents' commands at a size that takes a second: a tiny model, tiny data, few tokens."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from lazysched.cli import main
from tests.end_to_end.tiny_folder import WORDS, make_data, make_model

NAMES = {
    "Qwen/Qwen2.5-7B-Instruct": "model", "MODEL": "model", "/mnt/nvme": ".",
}  # fmt: skip
"""What the documents say -> what is there; files such as ``alpaca.json`` are there under their names."""
VALUES = {
    "--seq-len": "16", "--max-length": "16", "--max-new-tokens": "4", "--save-steps": "2", "--nvme": "1GB",
    "--time-limit": "2",
}  # fmt: skip
"""Option -> its value here. Batches, memory and all else are as in the documents."""
FIELDS = {"seq_len": 16, "max_length": 16, "save_steps": 2}
"""The same in YAML and Python."""
LEFT_OUT = {"--pin-limit"}
"""Options that mean nothing without a GPU."""
ON_THE_CPU = {"profile", "train", "evaluate"}
"""Commands that get ``--device cpu``: a GPU would compile."""
NO_DEVICE = {"--from-run", "--hardware-only"}
"""Options that go without it."""
ANY_END = {"doctor"}
"""Commands whose exit code says what the machine is like."""
NOT_RUN = {
    "pip": "installs from the network", "make": "makes an environment first", "git": "clones from the network",
    "cd": "each document has a folder of its own", "vllm": "needs a GPU", "numactl": "needs several nodes",
    "python": "a script of its own: benchmarks need a GPU, llama.cpp's converter is not ours",
    ".ci/run": "runs these tests",
}  # fmt: skip
"""Programs whose commands are looked at alone, and why."""


def scaled(words: list[str]) -> list[str]:
    """A command as it runs here."""
    found = [NAMES.get(word, word) for word in words]
    for index, word in enumerate(found[:-1]):
        found[index + 1] = VALUES.get(word, found[index + 1])
        if word in LEFT_OUT:
            found[index : index + 2] = ["", ""]
    found = [word for word in found if word]
    return [*found, "--device", "cpu"] if words[1] in ON_THE_CPU and not NO_DEVICE & set(words) else found


def scaled_text(text: str) -> str:
    """YAML or Python likewise."""
    for field, value in FIELDS.items():
        text = re.sub(rf"\b{field}( ?[:=] ?)\d+", rf"{field}\g<1>{value}", text)
    for name, stand_in in NAMES.items():
        text = re.sub(rf'(?<=["\s]){re.escape(name)}(?=["\s])', stand_in, text)
    return text


def fill(folder: Path) -> None:
    """Everything that a document may name: model, configuration, data in a few formats, a profile and a plan."""
    make_model(folder / "model", num_hidden_layers=2, max_position_embeddings=8192)
    shutil.copy(folder / "model" / "config.json", folder / "config.json")
    for name in ("train.jsonl", "test.jsonl"):
        make_data(folder / name, 64)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    alpaca = [{"instruction": row["question"], "input": "", "output": row["answer"]} for row in rows]
    for name in ("alpaca.json", "held-out.json"):
        (folder / name).write_text(json.dumps(alpaca))
    numbered = [{"question": row["question"], "answer": f"{WORDS.index('one') + k}"} for k, row in enumerate(rows[:4])]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))
    profile, plan = str(folder / "profile.json"), str(folder / "plan.json")
    size = ["--seq-len", "16", "--micro-batch", "2", "--micro-batch", "8", "--device", "cpu"]
    run(["profile", str(folder / "model"), *size, "-o", profile])
    run(["solve", profile, "--batch-size", "32", "--gpu-memory", "24GB", "--host-memory", "100GB", "-o", plan])


def run(arguments: Iterable[str]) -> None:
    """A command that has to succeed."""
    listed = list(arguments)
    assert main(listed) == 0, " ".join(listed)
