"""``minuet serve``: an OpenAI-compatible endpoint for one model."""

import argparse

from minuet.cli import options
from minuet.models.parsing import dialect_names

SUMMARY = "Serve a model over HTTP, compatible with OpenAI's API."
EXAMPLES = f"""examples:
  minuet serve                        the small trained model that ships with Minuet
  minuet serve CHECKPOINT
  minuet serve CHECKPOINT --host 0.0.0.0 --port 8080 --api-key KEY --served-model-name m3
  minuet serve CHECKPOINT --max-num-seqs 64 --max-num-queued-reqs 256
  curl http://127.0.0.1:8000/v1/models

The page at http://127.0.0.1:8000/ shows what the server does and has a chat box; docs/serving.md
explains every route. Parsers: {", ".join(dialect_names())}. SIGTERM drains: no new requests, those
in flight go on for --drain-timeout.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the sub-command."""
    options.add_settings(parser, server=True)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; 1 if the engine could not be kept alive."""
    chosen = options.read(args)

    import uvloop

    from minuet.server.app import serve

    return uvloop.run(serve(chosen))
