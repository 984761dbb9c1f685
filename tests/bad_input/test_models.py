"""Model folders that are damaged, incomplete, of a kind that is not read, or that lead out of themselves."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bad_input.driver import ESTIMATE, EVALUATE, PREPARE, PROFILE, TRAIN, Bad, check, parametrized
from tests.bad_input.files import Files, edit

Spoil = Callable[[Files], object]
SUMMARY = "{data}: 24 of 24 rows"
WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"


def writing(name: str, content: str | bytes) -> Spoil:
    return lambda files: (files.model / name).write_bytes(content.encode() if isinstance(content, str) else content)


def without(*names: str) -> Spoil:
    def remove(files: Files) -> None:
        for name in names:
            (files.model / name).unlink()

    return remove


def config(**changes: Any) -> Spoil:
    """Other settings in config.json; None leaves one out."""

    def change(document: dict[str, Any]) -> None:
        document.update(changes)
        for name in [name for name, value in changes.items() if value is None]:
            del document[name]

    return lambda files: edit(files.model / CONFIG, change)


def cut(num_bytes: int) -> Spoil:
    """Only the first bytes of the weights."""

    def truncate(files: Files) -> None:
        path = files.model / WEIGHTS
        path.write_bytes(path.read_bytes()[:num_bytes])

    return truncate


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """Other tensors in the weights."""

    def rewrite(files: Files) -> None:
        path = files.model / WEIGHTS
        found = load_file(path)
        change(found)
        save_file(found, path, metadata={"format": "pt"})

    return rewrite


def header(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Another header before the same bytes."""

    def rewrite(files: Files) -> None:
        path = files.model / WEIGHTS
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        document = json.loads(content[8 : 8 + length])
        change(document)
        text = json.dumps(document).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return rewrite


def sharded(files: Files, change: Callable[[dict[str, str]], object] = lambda weight_map: None) -> None:
    """The weights in two files and an index."""
    found = load_file(files.model / WEIGHTS)
    names = sorted(found)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: found[name] for name in part}, files.model / file, metadata={"format": "pt"})
    (files.model / WEIGHTS).unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    change(weight_map)
    (files.model / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def index_naming(file: str) -> Spoil:
    """An index whose first tensor lies in ``file``."""
    return lambda files: sharded(files, lambda weight_map: weight_map.update({min(weight_map): file}))


def linked(files: Files) -> None:
    """The weights are a link out of the folder to a file that is none of them."""
    secret = files.root / "secret.safetensors"
    secret.write_bytes(b"years of work")
    (files.model / WEIGHTS).unlink()
    (files.model / WEIGHTS).symlink_to(secret)


def pickled(files: Files) -> None:
    (files.model / WEIGHTS).unlink()
    (files.model / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def poisoned(name: str, value: float) -> Spoil:
    return tensors(lambda found: found[name].view(-1)[:1].fill_(value))


NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"

WEIGHT_ROWS = (
    Bad("no folder", TRAIN.replace("{model}", "{root}/nowhere"), ("{root}/nowhere", "check the path")),
    Bad("a text file", TRAIN.replace("{model}", "{data}"), ("{data}: not a model", "name a folder")),
    Bad("a GGUF file that is none", TRAIN.replace("{model}", "{root}/m.gguf"), ("m.gguf",),
        lambda files: (files.root / "m.gguf").write_text("GGUF?")),
    Bad("a GGUF file that is not there", PROFILE.replace("{model}", "{root}/m.gguf"), ("m.gguf", "no such file")),
    Bad("a hub name without network", TRAIN.replace("{model}", "nobody/nothing"), ("nobody/nothing", "the hub", "check")),
    Bad("no weights", TRAIN, ("{model} has no weights", "--init random"), without(WEIGHTS)),
    Bad("only pickled weights", TRAIN, ("pytorch_model.bin: only safetensors", "save_pretrained"), pickled),
    Bad("only pickled weights to profile", PROFILE, ("pytorch_model.bin: only safetensors", "save_pretrained"), pickled),
    Bad("only pickled weights to evaluate", EVALUATE, ("pytorch_model.bin: only safetensors", "save_pretrained"), pickled),
    Bad("only pickled weights to tokenise", PREPARE, ("pytorch_model.bin: only safetensors", "save_pretrained"), pickled),
    Bad("empty weights", TRAIN, (WEIGHTS, "truncated or damaged", "download it again"), cut(0)),
    Bad("half a header's length", TRAIN, (WEIGHTS, "truncated or damaged"), cut(5)),
    Bad("half a header", TRAIN, (WEIGHTS, "truncated or damaged"), cut(40)),
    Bad("half the weights", PROFILE, (WEIGHTS, "truncated or damaged"), cut(2000)),
    Bad("a header of 2^60 bytes", TRAIN, (WEIGHTS, "truncated or damaged"), writing(WEIGHTS, struct.pack("<Q", 2**60))),
    Bad("a header that is no JSON", TRAIN, (WEIGHTS, "truncated or damaged"), writing(WEIGHTS, struct.pack("<Q", 4) + b"{{{{")),
    Bad("text for weights", TRAIN, (WEIGHTS, "truncated or damaged"), writing(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n")),
    Bad("places beyond the end", TRAIN, (WEIGHTS, "truncated or damaged"),
        header(lambda document: document[NORM].update(data_offsets=[0, 10**9]))),
    Bad("a dtype that there is not", TRAIN, (WEIGHTS, "truncated or damaged"),
        header(lambda document: document[NORM].update(dtype="F3"))),
    Bad("a shape with other bytes", TRAIN, (WEIGHTS, "truncated or damaged"),
        header(lambda document: document[NORM].update(shape=[31]))),
    Bad("8-bit weights", TRAIN, (WEIGHTS, QUERY, "stored as I8", "float16, bfloat16 or float32"),
        tensors(lambda found: found.update({QUERY: found[QUERY].to(torch.int8)})), shown=SUMMARY),
    Bad("a tensor of another shape", TRAIN, (WEIGHTS, QUERY, "(16, 32)", "(32, 32)", "config.json"),
        tensors(lambda found: found.update({QUERY: found[QUERY][:16].clone()})), shown=SUMMARY),
    Bad("a tensor is missing", TRAIN, (QUERY, "missing", "config.json"), tensors(lambda found: found.pop(QUERY)), shown=SUMMARY),
    Bad("a weight that is not a number", TRAIN, (WEIGHTS, QUERY, "nan", "download"), poisoned(QUERY, float("nan")), shown=SUMMARY),
    Bad("an infinite weight", TRAIN, (WEIGHTS, NORM, "inf", "download"), poisoned(NORM, float("inf")), shown=SUMMARY),
    Bad("an index that is no JSON", TRAIN, (INDEX, "not a safetensors index", "download"),
        lambda files: (sharded(files), (files.model / INDEX).write_text("{"))),
    Bad("an index of nothing", TRAIN, (INDEX, "weight_map", "download"),
        lambda files: (sharded(files), (files.model / INDEX).write_text("{}"))),
    Bad("an index of a list", TRAIN, (INDEX, "not a safetensors index"),
        lambda files: (sharded(files), (files.model / INDEX).write_text('{"weight_map": ["a"]}'))),
    Bad("an index of numbers", TRAIN, (INDEX, "not a safetensors index"),
        lambda files: (sharded(files), (files.model / INDEX).write_text('{"weight_map": {"a": 5}}'))),
    Bad("a shard is missing", TRAIN, ("model-00002-of-00002.safetensors: missing", INDEX, "download"),
        lambda files: (sharded(files), (files.model / "model-00002-of-00002.safetensors").unlink())),
    Bad("half a shard", TRAIN, ("model-00002-of-00002.safetensors", "truncated or damaged"),
        lambda files: (sharded(files), (files.model / "model-00002-of-00002.safetensors").write_bytes(b"1234"))),
    Bad("an index that names another shard", TRAIN, ("missing, though", INDEX), index_naming("model-00002-of-00002.safetensors")),
    Bad("an index that names a tensor too many", TRAIN, ("model.extra: missing, though", INDEX),
        lambda files: sharded(files, lambda m: m.update({"model.extra": "model-00001-of-00002.safetensors"}))),
    Bad("an index that leads up", TRAIN, (INDEX, "../../x.safetensors", "outside its folder"), index_naming("../../x.safetensors")),
    Bad("an index that leads to the root", TRAIN, (INDEX, "/etc/passwd", "outside its folder"), index_naming("/etc/passwd")),
    Bad("an index that leads down", TRAIN, (INDEX, "sub/x.safetensors", "outside its folder"), index_naming("sub/x.safetensors")),
    Bad("an index of the folder itself", TRAIN, (INDEX, "outside its folder"), index_naming("..")),
    Bad("an index with a null", TRAIN, (INDEX,), index_naming("a\0b")),
    Bad("a tensor in two files", TRAIN, ("also in", "keep one"),
        lambda files: (sharded(files), (files.model / INDEX).unlink(), (files.model / "x.safetensors").write_bytes(
            (files.model / "model-00001-of-00002.safetensors").read_bytes()))),
    Bad("weights that are a link to something else", TRAIN, (WEIGHTS, "truncated or damaged"), linked),
    Bad("weights that are a broken link", TRAIN, (WEIGHTS,),
        lambda files: ((files.model / WEIGHTS).unlink(), (files.model / WEIGHTS).symlink_to("/nowhere/x"))),
    Bad("weights that are a folder", TRAIN, (WEIGHTS,),
        lambda files: ((files.model / WEIGHTS).unlink(), (files.model / WEIGHTS).mkdir())),
)  # fmt: skip

CONFIG_ROWS = (
    Bad("no config.json", TRAIN, ("{model}: has no config.json", "name the folder"), without(CONFIG)),
    Bad("an empty config.json", TRAIN, (CONFIG, "not valid JSON", "download"), writing(CONFIG, "")),
    Bad("a list for a config.json", TRAIN, (CONFIG, "model_type: missing"), writing(CONFIG, "[]")),
    Bad("bytes for a config.json", PROFILE, (CONFIG, "not valid JSON"), writing(CONFIG, b"\xff\x00")),
    Bad("brackets without end", PROFILE, (CONFIG, "not valid JSON"), writing(CONFIG, "[" * 100000)),
    Bad("no model type", PROFILE, (CONFIG, "model_type: missing"), config(model_type=None)),
    Bad("a number for a model type", PROFILE, (CONFIG, "model_type"), config(model_type=5)),
    Bad("a model type that nobody knows", PROFILE, (CONFIG, "`llamma`"), config(model_type="llamma")),
    Bad("a model that reads no text", PROFILE, ("model", "vit"), writing(CONFIG, '{"model_type": "vit"}')),
    Bad("an encoder", TRAIN, ("'t5'", "decoder-only"), writing(CONFIG, '{"model_type": "t5"}'), shown=SUMMARY),
    Bad("no blocks", PROFILE, (CONFIG, "num_hidden_layers: 0", "from 1"), config(num_hidden_layers=0)),
    Bad("blocks below 0", PROFILE, ("num_hidden_layers", "-1"), config(num_hidden_layers=-1)),
    Bad("blocks in words", PROFILE, (CONFIG, "num_hidden_layers"), config(num_hidden_layers="three")),
    Bad("half a block", PROFILE, (CONFIG, "num_hidden_layers"), config(num_hidden_layers=1.5)),
    Bad("no hidden size", PROFILE, ("hidden_size",), config(hidden_size=0, head_dim=None)),
    Bad("hidden size below 0", PROFILE, ("hidden_size",), config(hidden_size=-32, head_dim=None)),
    Bad("hidden size in words", PROFILE, (CONFIG, "hidden_size"), config(hidden_size="wide")),
    Bad("no heads", PROFILE, ("num_attention_heads",), config(num_attention_heads=0, head_dim=None)),
    Bad("heads that do not divide", PROFILE, ("head",), config(num_attention_heads=5, head_dim=None)),
    Bad("groups that do not divide", PROFILE, ("model",), config(num_key_value_heads=3)),
    Bad("no vocabulary", PROFILE, ("vocab_size",), config(vocab_size=0)),
    Bad("a vocabulary below 0", PROFILE, ("vocab_size",), config(vocab_size=-5)),
    Bad("an activation that there is not", PROFILE, ("hidden_act", "relish"), config(hidden_act="relish")),
    Bad("rotary settings in words", PROFILE, ("rope",), config(rope_parameters="yes")),
    Bad("a rotary type that there is not", PROFILE, ("rope", "spiral"), config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})),
    Bad("dropout", PROFILE, ("dropout is 0.1", "config.json"), config(attention_dropout=0.1)),
    Bad("a dtype that there is not", PROFILE, ("dtype", "float99"), config(dtype="float99")),
    Bad("a vocabulary of 10^15", PROFILE, ("model",), config(vocab_size=10**15)),
    Bad("a config of other weights", TRAIN, ("plan", "model"), config(intermediate_size=64), shown=SUMMARY),
    Bad("no blocks to estimate for", ESTIMATE, ("num_hidden_layers",), config(num_hidden_layers=0)),
    Bad("blocks in words to estimate for", ESTIMATE, ("num_hidden_layers",), config(num_hidden_layers="three")),
    Bad("an unknown model to estimate for", ESTIMATE, ("llamma",), config(model_type="llamma")),
    Bad("a config.json without weights to evaluate", EVALUATE, ("no weights",), without(WEIGHTS)),
    Bad("an evaluation of weights of another shape", EVALUATE, ("(32, 48) does not fit (32, 64)", "use the config.json"),
        config(intermediate_size=64)),
    Bad("an evaluation with a tensor missing", EVALUATE, (QUERY, "missing; use the weights"),
        tensors(lambda found: found.pop(QUERY))),
    Bad("an evaluation of no blocks", EVALUATE, ("num_hidden_layers: 0",), config(num_hidden_layers=0)),
)  # fmt: skip

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_ROWS = (
    Bad("no tokenizer", TRAIN, ("{model} has no tokenizer", "beside config.json"), without(TOKENIZER)),
    Bad("no tokenizer to evaluate with", EVALUATE, ("{model} has no tokenizer",), without(TOKENIZER)),
    Bad("half a tokenizer", TRAIN, ("{model}: its tokenizer cannot be read", "download"), writing(TOKENIZER, '{"model":')),
    Bad("a tokenizer of nothing", PREPARE, ("{model}: its tokenizer cannot be read",), writing(TOKENIZER, "{}")),
    Bad("a list for its settings", PREPARE, ("{model}: its tokenizer cannot be read",), writing("tokenizer_config.json", "[]")),
    Bad("no text for its settings", PREPARE, ("{model}: its tokenizer cannot be read",), writing("tokenizer_config.json", b"\xff")),
    Bad("no token that ends a text", PREPARE, ("eos_token", "set eos_token"),
        lambda files: edit(files.model / "tokenizer_config.json", lambda d: d.update(eos_token=None))),
    Bad("a template with a slip", PREPARE, ("chat template", "row 1"), writing(TEMPLATE, "{% for m in messages %}{{ m }")),
    Bad("a template that ends nothing", PREPARE, ("chat template", "row 1"), writing(TEMPLATE, "{% for m in messages %}")),
    Bad("a template of no text", PREPARE, ("{model}",), writing(TEMPLATE, b"\xff\xfe")),
    Bad("a template that refuses", PREPARE, ("row 1", "no such thing"), writing(TEMPLATE, "{{ raise_exception('no such thing') }}")),
    Bad("a template that is always the same", PREPARE, ("row 1", "chat template", "prompt/completion"), writing(TEMPLATE, "hello")),
    Bad("a template that divides by nothing", PREPARE, ("row 1", "chat template"), writing(TEMPLATE, "{{ 1 // 0 }}")),
    Bad("a template that adds text to a number", PREPARE, ("row 1", "chat template"), writing(TEMPLATE, "{{ 'a' + 1 }}")),
    Bad("a template that calls what there is not", PREPARE, ("row 1", "chat template"), writing(TEMPLATE, "{{ no_such() }}")),
    Bad("a template that reaches for the system", PREPARE, ("row 1", "chat template", "unsafe"),
        writing(TEMPLATE, "{{ messages.__class__.__mro__[1].__subclasses__() }}")),
    Bad("a template that runs a program", PREPARE, ("row 1", "chat template"),
        writing(TEMPLATE, "{{ cycler.__init__.__globals__.os.mkdir('pwned') }}")),
    Bad("a template that changes the messages", PREPARE, ("row 1", "chat template"), writing(TEMPLATE, "{{ messages.append(1) }}")),
    Bad("a template that never ends", PREPARE, ("row 1", "chat template"), writing(TEMPLATE, "{% for i in range(10**9) %}x{% endfor %}")),
    Bad("a template that refuses to evaluate", EVALUATE, ("row 1", "no such thing"), writing(TEMPLATE, "{{ raise_exception('no such thing') }}")),
    Bad("a template with a slip to evaluate", EVALUATE, ("row 1", "chat template"), writing(TEMPLATE, "{% for m in")),
)  # fmt: skip


@parametrized(WEIGHT_ROWS)
def test_bad_weights(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


@parametrized(CONFIG_ROWS)
def test_bad_config_json(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


@parametrized(TOKENIZER_ROWS)
def test_bad_tokenizers(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)
