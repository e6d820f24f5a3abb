"""Answers that keep to a schema: xgrammar says which tokens may come next. It fails closed.

A token that the grammar does not allow is never drawn; if none is allowed, or a drawn token is not
accepted, the request ends with an error. Nothing falls back to free text.
"""

import importlib
import re
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from minuet.engine.ipc import GrammarSpec
from minuet.errors import RequestError

_CACHE_BYTES = 64 * 2**20
_CONTROLS = frozenset(range(0x20))
_MAX_WHITESPACE = 32


class Vocabulary(Protocol):
    """The part of a tokenizer that a grammar needs."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for."""
        ...


class Grammars:
    """Compiles grammars for one model; :meth:`compile` may be called from any thread.

    Args:
        tokens: what each token stands for.
        vocab_size: columns of the logits; at least the tokenizer's.
        stop_token_ids: tokens that may follow a complete answer.
        markers: further ids that must never be part of a constrained answer.
    """

    def __init__(
        self,
        tokens: Vocabulary,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        markers: Sequence[int] = (),
    ):
        self._xgrammar = importlib.import_module("xgrammar")
        # xgrammar never allows a token without bytes: so markers cannot be smuggled into strings
        hidden = tokens.special_ids | set(markers)
        self._texts = [
            b"" if i in hidden else tokens.token_bytes(i)
            for i in range(min(tokens.vocab_size, vocab_size))
        ]
        self._vocab_size, self._stop_ids = vocab_size, list(stop_token_ids)
        self._compiler = self._compiler_without(frozenset())
        self._json_compilers = {b"\n": self._compiler_without(_CONTROLS - set(b"\n"))}

    def _compiler_without(self, banned: frozenset[int]) -> Any:
        """A compiler that never allows a token with one of these bytes."""
        texts = [b"" if banned.intersection(text) else text for text in self._texts]
        info = self._xgrammar.TokenizerInfo(
            texts,
            vocab_type=self._xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=self._stop_ids,
            add_prefix_space=False,
        )
        return self._xgrammar.GrammarCompiler(
            info, max_threads=1, cache_enabled=True, cache_limit_bytes=_CACHE_BYTES
        )

    def _from_schema(self, source: str) -> Any:
        # xgrammar lets strings of a limited length hold control characters, and those of a pattern
        # line breaks too. That is no JSON, so tokens with any are kept out of the whole answer
        raw = b"" if '"pattern"' in source else b"\n"
        if raw not in self._json_compilers:
            self._json_compilers[raw] = self._compiler_without(_CONTROLS - set(raw))
        # a model that likes white space could otherwise write nothing else
        return self._json_compilers[raw].compile_json_schema(
            source, max_whitespace_cnt=_MAX_WHITESPACE
        )

    def compile(self, spec: GrammarSpec) -> "Grammar":
        """A new state for one request.

        Raises:
            RequestError: not a grammar that xgrammar understands.
        """
        make = {
            "json_schema": self._from_schema,
            "json_object": lambda _: self._from_schema('{"type": "object"}'),
            "regex": self._compiler.compile_regex,
            "ebnf": self._compiler.compile_grammar,
            "structural_tag": self._compiler.compile_structural_tag,
        }[spec.kind]
        try:
            compiled = make(spec.source)
        except Exception as problem:  # noqa: BLE001  # the library raises RuntimeError and more
            # without the place in the library's source
            reason = re.sub(r"^\[[^\]]*\] \S+: ", "", str(problem)).strip()[:300]
            raise RequestError(
                f"cannot compile this {spec.kind}: {reason}", param=spec.param
            ) from None
        return Grammar(self._xgrammar, compiled, self._vocab_size, spec.start_after)


class Grammar:
    """Where one request stands in its grammar.

    Args:
        xgrammar: the module.
        compiled: the grammar.
        vocab_size: columns of the logits.
        start_after: nothing is constrained up to and including this token.
    """

    def __init__(self, xgrammar: Any, compiled: Any, vocab_size: int, start_after: int | None):
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._start_after = start_after
        self._started = start_after is None

    def allowed(self, ahead: Sequence[int] = ()) -> np.ndarray | None:
        """What may come next.

        Args:
            ahead: tokens taken for granted before it. Where they do not fit, the row that draws
                them is masked, so this one will not count.

        Returns:
            [words] int32, for the caller to keep: bit ``t % 32`` of word ``t // 32`` allows token
            ``t``, and all zero if nothing may come; None: anything may.
        """
        if not self._started:
            return None
        accepted = 0
        while accepted < len(ahead) and self._matcher.accept_token(ahead[accepted]):
            accepted += 1
        if accepted < len(ahead) or self._matcher.is_terminated():
            words = np.zeros(self._bitmask.shape[1], np.int32)
        else:
            self._matcher.fill_next_token_bitmask(self._bitmask)
            words = self._bitmask[0].numpy().copy()
        if accepted:
            self._matcher.rollback(accepted)
        return words

    def accept(self, token_id: int) -> bool:
        """Advance by a drawn token; False if the grammar does not allow it."""
        if not self._started:
            self._started = token_id == self._start_after
            return True
        return bool(self._matcher.accept_token(token_id))
