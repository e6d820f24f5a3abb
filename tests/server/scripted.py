"""An engine that says what the prompt tells it to, for tests of everything around the model.

The real scheduler, pages, detokeniser and process; only the model is replaced. A prompt may hold
``SAY{...}YAS`` with a JSON object: ``text`` to say, ``repeat``ed, ``split`` to say it byte by
byte, ``delay_ms`` per step, and ``do`` (nan, raise, crash, hang) ``at`` a token. Without it, the
engine repeats itself.
"""

import json
import os
import re
import sys
import time

from minuet.config import Options
from minuet.engine import ipc
from minuet.engine.core import Core, Limits
from minuet.engine.pages import PagePool
from minuet.engine.prefix import PrefixCache, lane_salt
from minuet.engine.process import Served
from minuet.engine.scheduler import Scheduler
from minuet.engine.types import NOT_FINITE, Answered, Sampled, TokenLogprobs
from minuet.models.tokenizer import Tokenizer

FACTORY = "tests.server.scripted:prepare"
MAX_MODEL_LEN = 4096
_SCRIPT = re.compile(r"SAY(\{.*?\})YAS", re.DOTALL)


def say(text="", **how):
    """The part of a prompt that makes the engine say this."""
    return "SAY" + json.dumps({"text": text, **how}, ensure_ascii=False) + "YAS"


class Script:
    def __init__(self, tokenizer, eos, prompt):
        found = _SCRIPT.findall(tokenizer.decode(prompt, skip_special=False))
        told = json.loads(found[-1]) if found else {}
        text = told.get("text", "") * told.get("repeat", 1)
        pieces = [bytes([b]) for b in text.encode()] if told.get("split") else None
        if pieces:
            by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
            self.tokens = [by_bytes[piece] for piece in pieces]
        else:
            self.tokens = tokenizer.encode(text)
        self.do, self.at = told.get("do"), told.get("at", 0)
        self.delay_s = told.get("delay_ms", 0) / 1e3
        self.filler = None if found else tokenizer.encode(" a")[0]
        self.eos = eos

    def token(self, number):
        if self.filler is not None:
            return self.filler
        return self.tokens[number] if number < len(self.tokens) else self.eos


class Executor:
    depth = 0

    def __init__(self, tokenizer, eos):
        self.tokenizer, self.eos, self.scripts = tokenizer, eos, {}

    def submit(self, step):
        results = [self._one(share) for share in step.scheduled]
        delays = (self._script(share.request).delay_s for share in step.scheduled)
        if delay := max(delays, default=0.0):
            time.sleep(delay)
        live = {share.request.arrival for share in step.scheduled}
        if len(self.scripts) > 4096:
            self.scripts = {k: v for k, v in self.scripts.items() if k in live}
        return Answered(results)

    def _script(self, request):
        if request.arrival not in self.scripts:
            self.scripts[request.arrival] = Script(
                self.tokenizer, self.eos, request.prompt_token_ids
            )
        return self.scripts[request.arrival]

    def _one(self, share):
        if not share.samples:
            return Sampled(None)
        script, number = self._script(share.request), len(share.request.output_token_ids)
        if script.do and number == script.at:
            if script.do == "nan":
                return Sampled(None, error=NOT_FINITE)
            if script.do == "raise":
                raise RuntimeError("the script says so")
            if script.do == "crash":
                os._exit(9)
            if script.do == "hang":
                time.sleep(3600)
        token = script.token(number)
        params, report, prompt = share.request.params, None, ()
        if params.logprobs is not None:
            report = TokenLogprobs(token, -0.5, 1, ((token, -0.5),)[: params.logprobs])
        if params.prompt_logprobs is not None:
            ids = share.request.prompt_token_ids[1:]
            prompt = tuple(TokenLogprobs(i, -1.0, 2, ()) for i in ids)
        return Sampled(token, report, prompt)


def prepare(options: Options) -> Served:
    """The factory that the engine process calls."""
    tokenizer = Tokenizer.load(options["model"])
    eos = tokenizer.token_id("[e~[")
    pool = PagePool(2048, 16)
    salt = lane_salt(model_fingerprint="scripted", lane_dtypes={}, page_size=16)
    scheduler = Scheduler(
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        pool=pool,
        prefix=PrefixCache(pool, salt),
    )
    limits = Limits(tokenizer.vocab_size, options["max_logprobs"], (eos,))
    core = Core(scheduler, Executor(tokenizer, eos), limits, tokenizer)
    settings = [("model", str(options["model"]), "flag")]
    ready = ipc.Ready(
        os.getpid(), MAX_MODEL_LEN, tokenizer.vocab_size, pool.capacity, settings, {}, {}
    )
    return Served(core, ready, _Grammars(tokenizer, eos))


class _Grammars:
    """Compiles for real, so that refusals are real; made on first use: most tests need none."""

    def __init__(self, tokenizer, eos):
        self._made, self._args = None, (tokenizer, tokenizer.vocab_size, [eos])

    def compile(self, spec):
        from minuet.engine.grammar import Grammars  # brings torch

        self._made = self._made or Grammars(*self._args)
        return self._made.compile(spec)


def main(argv):
    """``minuet serve`` with this engine."""
    import argparse
    import asyncio

    from minuet.cli import options
    from minuet.server.app import serve

    parser = argparse.ArgumentParser()
    options.add_settings(parser, server=True)
    return asyncio.run(serve(options.read(parser.parse_args(argv)), factory=FACTORY))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
