"""Conversations to token ids: the checkpoint's Jinja template, in a sandbox, safe from markers.

What a caller writes can never become a turn marker, a reasoning marker or any other token that the
tokenizer matches before it splits text: such texts inside messages are cut in two by a character
that occurs nowhere else, and the parts are encoded apart. The ids spell the same text; only the
template itself writes markers.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from minuet.errors import ConfigError, RequestError

# noncharacters of Unicode: never assigned, so hardly ever in a text
_CUTS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt.

    Attributes:
        text: what the model reads.
        token_ids: the same in tokens.
    """

    text: str
    token_ids: list[int]


class Template:
    """One model's chat template.

    Args:
        source: Jinja.
        variables: texts of the special tokens, for the template.
        markers: texts that the tokenizer turns into single tokens wherever they stand.
        encode: text to token ids.

    Raises:
        ConfigError: not a template.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        markers: Sequence[str],
        encode: Callable[[str], list[int]],
    ):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as problem:
            raise ConfigError("the chat template is not Jinja", got=str(problem)) from None
        self.source, self._variables, self._encode = source, dict(variables), encode
        self._markers = [marker for marker in markers if len(marker) > 1]
        starts = "|".join(re.escape(marker) for marker in self._markers)
        self._marker_start = re.compile(f"(?=(?:{starts}))(.)", re.DOTALL) if starts else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The prompt of a conversation.

        Args:
            messages: as the template wants them; tool call arguments are objects.
            tools: functions on offer.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end within the last message instead.
            kwargs: more variables for the template.

        Raises:
            RequestError: the template refuses the conversation.
        """
        said = json.dumps([messages, tools], ensure_ascii=False)
        cut = next((c for c in _CUTS if c not in said), None)
        if cut is None:
            raise RequestError("too many noncharacters of Unicode", param="messages")
        shown = [self._protected(message, cut) for message in messages]
        end = ""
        if continue_final_message:
            # the cut marks the end: it is in no other text, so it is found again
            end = cut * 2 + "end" + cut * 2
            shown[-1]["content"] = _with_end(shown[-1].get("content"), end)
        text = self._run(
            messages=shown,
            tools=None if tools is None else [self._protected(tool, cut) for tool in tools],
            add_generation_prompt=add_generation_prompt,
            **self._protected(dict(kwargs or {}), cut),
        )
        if end:
            text = text[: text.index(end)] if end in text else _cannot_continue()
        parts = text.split(cut)
        return Rendered("".join(parts), [i for part in parts if part for i in self._encode(part)])

    def _run(self, **variables: Any) -> str:
        try:
            return self._template.render(**{**self._variables, **variables})
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as problem:
            raise RequestError(
                f"the chat template refuses this conversation: {str(problem)[:300]}",
                param="messages",
            ) from None

    def _protected(self, value: Any, cut: str) -> Any:
        """The value with every marker in its texts cut in two."""
        if isinstance(value, str):
            return self._protected_text(value, cut)
        if isinstance(value, Mapping):
            return {self._protected(k, cut): self._protected(v, cut) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._protected(item, cut) for item in value]
        return value

    def _protected_text(self, text: str, cut: str) -> str:
        if self._marker_start is None or not text:
            return text
        text = self._marker_start.sub(rf"\1{cut}", text)
        # an end of the text may be the beginning of a marker that the template's text completes
        sizes = range(1, max(map(len, self._markers)))
        if any(m.startswith(text[-s:]) for s in sizes for m in self._markers if s < len(m)):
            text += cut
        if any(m.endswith(text[:s]) for s in sizes for m in self._markers if s < len(m)):
            text = cut + text
        return text


def _with_end(content: Any, end: str) -> Any:
    if isinstance(content, str):
        return content + end
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + end}]
    return _cannot_continue()


def _cannot_continue() -> Any:
    raise RequestError("the last message has no text to continue", param="continue_final_message")


def load(
    folder: Path | None,
    override: str,
    markers: Sequence[str],
    encode: Callable[[str], list[int]],
) -> Template | None:
    """The template of a checkpoint.

    Args:
        folder: of the checkpoint.
        override: a file to use instead; empty: none.
        markers: see :class:`Template`.
        encode: see :class:`Template`.

    Returns:
        None where there is none.

    Raises:
        ConfigError: a file that cannot be read, or is no template.
    """
    config = _read_json(folder / "tokenizer_config.json") if folder else {}
    source = config.get("chat_template")
    path = Path(override) if override else folder / "chat_template.jinja" if folder else None
    if path is not None and (override or path.is_file()):
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(
                f"cannot read the chat template {path}", got=str(problem), expected="a Jinja file"
            ) from None
    if not isinstance(source, str):
        return None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    variables = {name: _token_text(config.get(name)) for name in names}
    return Template(source, variables, markers, encode)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


# --- what templates of this ecosystem expect -----------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's text for training: its body, as it is."""

    tags = {"generation"}  # noqa: RUF012  # the library's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(  # the arguments templates know
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
