"""The offline interface: prompts in, answers out, over the same core that a server runs."""

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from tqdm import tqdm

from minuet.config import read_options
from minuet.engine.core import RequestOutput
from minuet.engine.start import Engine, log, start
from minuet.engine.types import FinishReason, SamplingParams
from minuet.errors import RequestError
from minuet.settings import DEFAULT_MODEL

Prompt = str | Sequence[int]


class LLM:
    """An engine in this process.

    ::

        llm = LLM("path/to/checkpoint")
        for output in llm.generate(["Hello"], SamplingParams(max_tokens=32)):
            print(output.text)

    Args:
        model: a checkpoint folder, a config file, or a name; see ``minuet.models.registry``.
        config: a settings file.
        announce: receives the plan's summary at start.
        settings: any setting by name; see docs/flags.md.

    Raises:
        RefusedError: the configuration cannot be served.
        ConfigError: a setting or a model that does not exist.
        CheckpointError: the weights are not the model.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        config: Path | None = None,
        announce: Callable[[str], None] = log.info,
        **settings: object,
    ):
        self.engine = start(read_options({"model": str(model), **settings}, config), announce)
        self._ids = count()

    @classmethod
    def over(cls, engine: Engine) -> "LLM":
        """Wrap an engine that is already prepared."""
        llm = cls.__new__(cls)
        llm.engine, llm._ids = engine, count()
        return llm

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids pass through. Nothing is added: a template is the caller's.

        Raises:
            RequestError: text, and the model has no tokenizer.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        if self.engine.tokenizer is None:
            raise RequestError(
                "this model has no tokenizer",
                param="prompt",
                got="text",
                expected="token ids",
                remedy="pass --prompt-token-ids, or add tokenizer.json to the folder",
            )
        return self.engine.tokenizer.encode(prompt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Answer prompts, batched as the scheduler sees fit.

        Args:
            prompts: one or many; text or token ids.
            params: one for all, or one per prompt; default :class:`SamplingParams`.
            progress: show a bar on stderr.
            on_error: ``raise`` refuses the whole call if one prompt can never be served, before any
                runs; ``return`` gives that prompt an output with ``error`` and serves the others.

        Returns:
            one output per prompt, in order.

        Raises:
            RequestError: see ``on_error``; or a prompt list and a params list of different lengths.
        """
        asked = _as_list(prompts)
        each = (
            list(params)
            if isinstance(params, Sequence)
            else [params or SamplingParams()] * len(asked)
        )
        if len(each) != len(asked):
            raise RequestError(
                "one params per prompt",
                param="params",
                got=len(each),
                expected=f"{len(asked)} or one for all",
            )
        outputs = self._add_all(asked, each, on_error)
        core = self.engine.core
        try:
            with tqdm(total=len(asked), desc="requests", disable=not progress, unit="req") as bar:
                bar.update(sum(o.finish_reason is not None for o in outputs))
                tokens = 0
                while core.has_work:
                    changed = core.step()
                    tokens += len(changed)
                    bar.set_postfix(tokens=tokens, refresh=False)
                    bar.update(sum(o.finish_reason is not None for o in changed))
        finally:
            # an interrupt or a failed step leaves no request behind
            for output in outputs:
                if output.finish_reason is None:
                    core.abort(output.request_id)
        return outputs

    def _add_all(
        self, prompts: list[Prompt], params: list[SamplingParams], on_error: str
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for prompt, wanted in zip(prompts, params, strict=True):
            request_id = f"req-{next(self._ids)}"
            try:
                outputs.append(self.engine.core.add(request_id, self.encode(prompt), wanted))
            except RequestError as problem:
                if on_error == "raise":
                    for output in outputs:
                        self.engine.core.abort(output.request_id)
                    raise
                ids = () if isinstance(prompt, str) else tuple(prompt)
                failed = RequestOutput(request_id, ids, finish_reason=FinishReason.ERROR)
                failed.error = str(problem)
                outputs.append(failed)
        return outputs


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [[int(i) for i in items if isinstance(i, int)]]
    return [p for p in items if not isinstance(p, int)]
