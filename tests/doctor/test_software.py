"""Probes of Python, packages, compiled code and a model's tokenizer."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from lazysched.doctor import kernels, model, software
from lazysched.doctor.children import Crashed
from lazysched.doctor.facts import GraphFacts, SelfTestFacts, TokenizerFacts, TorchFacts
from lazysched.doctor.looking import CannotLook, Later, Verdict
from lazysched.doctor.scene import Scene
from lazysched.runtime import kernels as compiled
from lazysched.runtime.hybrid8_backends import TorchUpdate
from lazysched.runtime.self_test import self_test
from lazysched.runtime.tokenizer_facts import tokenizer_facts
from tests.doctor.scenes import HUNG, WITH_GPU, WITHOUT_GPU, refusing, scene
from tests.end_to_end.tiny_folder import make_model
from tests.runtime.tiny_tokenizers import CHAT, WITH_BOS, make_tokenizer


class Installed:
    """Metadata of packages that are not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, python: str, requires: list[str], **versions: str) -> None:
        self.metadata, self.requires, self.versions = {"Requires-Python": python}, requires, versions
        monkeypatch.setattr(metadata, "distribution", lambda name: self)
        monkeypatch.setattr(metadata, "version", self.version)

    def version(self, name: str) -> str:
        if name not in self.versions:
            raise metadata.PackageNotFoundError(name)
        return self.versions[name]


def absent(name: str) -> None:
    raise metadata.PackageNotFoundError(name)


class TestPython:
    @pytest.mark.parametrize(("version", "status"), [("3.12.3", "ok"), ("3.10.12", "problem"), ("3.15.0", "problem")])
    def test_versions(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
        Installed(monkeypatch, ">=3.11,<3.14", [])
        monkeypatch.setattr(platform, "python_version", lambda: version)
        assert software.python(scene(tmp_path)).status == status

    def test_unknown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metadata, "distribution", absent)
        for probe in (software.python, software.packages):
            with pytest.raises(CannotLook, match="not installed, only found"):
                probe(scene(tmp_path))


NEEDS = ["torch>=2.10", "transformers>=5", "pulp<4,>=3.3", "jupyterlab>=4; extra == 'notebooks'"]


class TestPackages:
    def test_ok(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Installed(monkeypatch, ">=3.11", NEEDS, torch="2.13.0+cu130", transformers="5.24.0", pulp="3.3.2")
        found = software.packages(scene(tmp_path))
        assert found == Verdict("ok", "pulp 3.3.2, torch 2.13.0+cu130, transformers 5.24.0")

    def test_missing_or_out_of_range(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Installed(monkeypatch, ">=3.11", NEEDS, torch="2.13.0", pulp="4.0.0")
        found = software.packages(scene(tmp_path))
        assert found.detail == "transformers is missing (needs >=5), pulp 4.0.0 (needs <4,>=3.3)"
        assert found.remedy == "pip install 'transformers>=5' 'pulp<4,>=3.3'"


class TestTorch:
    @pytest.mark.parametrize(
        ("facts", "build"),
        [(WITH_GPU, "CUDA 13.0"), (WITHOUT_GPU, "CPU"), (WITHOUT_GPU.model_copy(update={"hip_build": "7"}), "ROCm 7")],
    )
    def test_build(self, tmp_path: Path, facts: TorchFacts, build: str) -> None:
        assert software.torch(scene(tmp_path, torch=facts)).detail == f"torch 2.13.0, built for {build}"

    def test_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Installed(monkeypatch, ">=3.11", [])
        assert software.torch(scene(tmp_path, torch=HUNG)).status == "problem"

    def test_unknown(self, tmp_path: Path) -> None:
        with pytest.raises(CannotLook, match=HUNG):
            software.torch(scene(tmp_path, torch=HUNG))


class TestOptimizer:
    GOOD = SelfTestFacts(built=True, variants=["portable", "avx2"], threads=14, on_gpu="triton", wrong=[])

    @pytest.mark.parametrize(
        ("changes", "status", "detail"),
        [
            ({}, "ok", "avx2 of portable, avx2, 14 threads; triton on the GPU; same bits as the reference"),
            ({"built": False, "variants": []}, "problem", "the compiled update is missing"),
            ({"wrong": ["avx2"]}, "problem", "wrong results of avx2"),
            ({"on_gpu": "torch"}, "problem", "Triton is missing"),
        ],
    )
    def test_judged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], status: str, detail: str
    ) -> None:
        monkeypatch.setattr(Scene, "self_test", lambda self: self_test_of(changes))
        found = kernels.optimizer(scene(tmp_path))
        assert found.status == status
        assert detail in found.detail

    def test_a_crash_is_a_problem_and_a_hang_unknown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def crash(made: Scene) -> None:
            raise Crashed("the process was ended by SIGILL")

        monkeypatch.setattr(Scene, "self_test", crash)
        assert kernels.optimizer(scene(tmp_path)).status == "problem"
        monkeypatch.setattr(Scene, "self_test", lambda made: refusing(HUNG))
        with pytest.raises(CannotLook, match=HUNG):
            kernels.optimizer(scene(tmp_path))

    def test_all_variants_here_have_the_references_bits(self) -> None:
        found = self_test("cpu")
        assert found.variants == list(compiled.variants())
        assert found.wrong == []

    def test_one_wrong_bit_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Wrong(TorchUpdate):
            def __init__(self, states: Any, variant: str) -> None:
                super().__init__(states)
                self._corrupts = variant == "second"

            def update(self, coefficients: torch.Tensor) -> None:
                super().update(coefficients)
                if self._corrupts:
                    self._states[0].first[-1] ^= 1

        monkeypatch.setattr(compiled, "variants", lambda: ("first", "second"))
        monkeypatch.setattr(compiled, "CompiledUpdate", Wrong)
        assert self_test("cpu").wrong == ["second"]


def self_test_of(changes: dict[str, Any]) -> SelfTestFacts:
    return TestOptimizer.GOOD.model_copy(update=changes)


class TestGraphs:
    @pytest.mark.parametrize(
        ("words", "status"), [(None, "ok"), ("RuntimeError: Failed to find C compiler", "problem")]
    )
    def test_judged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str | None, status: str) -> None:
        monkeypatch.setattr(Scene, "compile_on_gpu", lambda made: GraphFacts(problem=words))
        assert kernels.graphs(scene(tmp_path)).status == status

    def test_without_a_gpu_nothing_is_compiled(self, tmp_path: Path) -> None:
        assert kernels.graphs(scene(tmp_path, device="cpu")).status == "ok"

    def test_unknown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Scene, "compile_on_gpu", lambda made: refusing(HUNG))
        with pytest.raises(CannotLook, match=HUNG):
            kernels.graphs(scene(tmp_path))
        with pytest.raises(CannotLook, match="torch sees no GPU"):
            kernels.graphs(scene(tmp_path, torch=WITHOUT_GPU, device="cuda"))


GOOD_TOKENS = TokenizerFacts(
    problem=None, has_template=True, bos="<s>", num_leading_bos=1, max_token_id=9, embedding_rows=10
)  # fmt: skip


class TestTokenizer:
    @pytest.mark.parametrize(
        ("changes", "status", "detail"),
        [
            ({}, "ok", "rows begin with '<s>'; a chat template"),
            ({"num_leading_bos": 0, "has_template": False}, "ok", "without a start token; no chat template"),
            (
                {"template_adds_bos": True, "tokenizer_adds_bos": True},
                "ok",
                "once: chat template and tokenizer both add",
            ),
            ({"num_leading_bos": 2}, "problem", "rows begin with 2 of '<s>'"),
            ({"problem": "tokenizer: it has no eos_token; set eos_token"}, "problem", "it has no eos_token"),
        ],
    )
    def test_judged(self, changes: dict[str, Any], status: str, detail: str) -> None:
        found = model.tokenizer(Later(lambda: GOOD_TOKENS.model_copy(update=changes)))
        assert found.status == status
        assert detail in found.detail
        assert (found.remedy is not None) == (status == "problem")

    @pytest.mark.parametrize(
        ("changes", "status"), [({}, "ok"), ({"max_token_id": 10}, "problem"), ({"max_token_id": 11}, "problem")]
    )
    def test_rows_of_the_embedding(self, changes: dict[str, Any], status: str) -> None:
        assert model.vocabulary(Later(lambda: GOOD_TOKENS.model_copy(update=changes))).status == status

    @pytest.mark.parametrize(
        ("changes", "reason"), [({"problem": "x; y"}, "cannot be read"), ({"embedding_rows": None}, "vocab_size")]
    )
    def test_unknown(self, changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(CannotLook, match=reason):
            model.vocabulary(Later(lambda: GOOD_TOKENS.model_copy(update=changes)))
        with pytest.raises(CannotLook, match=HUNG):
            model.tokenizer(Later(lambda: refusing(HUNG)))

    def test_a_real_folder(self, tmp_path: Path) -> None:
        found = tokenizer_facts(str(make_model(tmp_path)))
        assert (found.problem, found.has_template, found.template_adds_bos) == (None, True, True)
        assert found.max_token_id < (found.embedding_rows or 0)

    @pytest.mark.parametrize(
        ("template", "adds_bos", "both", "leading"),
        [
            (WITH_BOS, True, True, 1),
            (WITH_BOS, False, False, 1),
            (CHAT, True, False, 0),
            (None, True, False, 1),
            ("<s>" + WITH_BOS, False, False, 2),
        ],
    )
    def test_who_adds_the_start_token(
        self, tmp_path: Path, template: str | None, adds_bos: bool, both: bool, leading: int
    ) -> None:
        (make_model(tmp_path) / "chat_template.jinja").unlink()
        make_tokenizer(template, adds_bos=adds_bos).save_pretrained(tmp_path)
        found = tokenizer_facts(str(tmp_path))
        assert found.problem is None
        assert (found.template_adds_bos and found.tokenizer_adds_bos) == both
        assert found.num_leading_bos == leading

    def test_folders_that_cannot_be_read(self, tmp_path: Path) -> None:
        made = make_model(tmp_path)
        (made / "tokenizer.json").write_text("{")
        assert "tokenizer" in (tokenizer_facts(str(made)).problem or "")
        (made / "tokenizer.json").unlink()
        for file in made.glob("*token*"):
            file.unlink()
        (made / "chat_template.jinja").unlink(missing_ok=True)
        assert "has no tokenizer; put" in (tokenizer_facts(str(made)).problem or "")
        (made / "config.json").write_text("{")
        assert tokenizer_facts(str(made)).problem


def test_a_scene_keeps_its_facts_to_itself(tmp_path: Path) -> None:
    first = scene(tmp_path, torch=WITHOUT_GPU)
    assert first.torch() == WITHOUT_GPU
    assert replace(first, torch=Later(lambda: WITH_GPU)).torch() == WITH_GPU
