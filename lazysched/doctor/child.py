"""What a child process of the doctor does: one task, whose facts it prints as the last line, in JSON."""

from __future__ import annotations

from collections.abc import Sequence

from lazysched.schemas import Schema


def main(arguments: Sequence[str]) -> None:
    """Do the task that the first argument names; errors end the process with their last line on stderr."""
    task, *rest = arguments
    print(f"\n{_facts(task, *rest).model_dump_json()}")


def _facts(task: str, *arguments: str) -> Schema:
    if task == "torch":
        from lazysched.runtime.gpu_facts import torch_facts

        return torch_facts()
    if task == "link":
        from lazysched.runtime.gpu_facts import link_under_load

        return link_under_load(*arguments)
    if task == "pinning":
        from lazysched.profiles.pinning import pinning_facts

        return pinning_facts()
    if task == "optimizer":
        from lazysched.runtime.self_test import self_test

        return self_test(*arguments)
    if task == "graphs":
        from lazysched.runtime.gpu_facts import compile_on_gpu

        return compile_on_gpu()
    assert task == "tokenizer", task
    from lazysched.runtime.tokenizer_facts import tokenizer_facts

    return tokenizer_facts(*arguments)
