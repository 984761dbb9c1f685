"""Probes of a model folder's tokenizer."""

from __future__ import annotations

from lazysched.doctor.facts import TokenizerFacts
from lazysched.doctor.looking import CannotLook, Later, Verdict, ok, problem


def tokenizer(facts: Later[TokenizerFacts]) -> Verdict:
    """Whether rows begin with one start token where template and tokenizer both add it."""
    found = facts()
    if found.problem is not None:
        detail, _, remedy = found.problem.rpartition("; ")
        return problem(detail or found.problem, remedy or "mend the folder")
    if found.num_leading_bos > 1:
        return problem(
            f"rows begin with {found.num_leading_bos} of {found.bos!r}: the chat template writes more than one",
            f"remove {found.bos!r} from the chat template",
        )
    starts = f"rows begin with {found.bos!r}" if found.num_leading_bos else "rows begin without a start token"
    if found.template_adds_bos and found.tokenizer_adds_bos:
        return ok(
            f"{starts}, once: chat template and tokenizer both add it; other tools double it unless they tokenise what "
            f"the template gave with add_special_tokens=False"
        )
    return ok(f"{starts}; {'a' if found.has_template else 'no'} chat template")


def vocabulary(facts: Later[TokenizerFacts]) -> Verdict:
    """Whether the embedding has a row for every token."""
    found = facts()
    if found.problem is not None:
        raise CannotLook("the tokenizer cannot be read")
    if found.embedding_rows is None:
        raise CannotLook("config.json does not say vocab_size")
    detail = f"largest token {found.max_token_id}, {found.embedding_rows} rows of the embedding"
    if found.max_token_id >= found.embedding_rows:
        return problem(
            detail,
            "resize the embedding (model.resize_token_embeddings in transformers), or take the tokenizer of this model",
        )
    return ok(detail)
