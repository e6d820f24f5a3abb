"""Token ids to text as they arrive, and stop strings found across token borders."""

from typing import Protocol


class TextStream(Protocol):
    """Incremental decoding; a tokenizer's ``stream()`` makes one."""

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while bytes of a character are missing."""
        ...

    def finish(self) -> str:
        """Text of what is still held back when no more tokens come."""
        ...


class Detokenizer:
    """The text of one request's output.

    Args:
        stream: incremental decoder of the tokenizer.
        stop: strings that end the request; cut from the text.
    """

    def __init__(self, stream: TextStream, stop: tuple[str, ...] = ()):
        self._stream, self._stop = stream, stop
        self.text = ""
        self._final = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token.

        Args:
            token_id: the token.
            may_stop: whether a stop string that it completes counts.

        Returns:
            The stop string it completed, if any; :attr:`text` is then cut before it.
        """
        piece = self._stream.push(token_id)
        if not self._stop:
            self.text += piece
            return None
        return self._append(piece, may_stop)

    def finish(self) -> None:
        """No more tokens: nothing is held back any longer."""
        if not self._final:
            self._append(self._stream.finish(), may_stop=True)
            self._final = True

    @property
    def visible(self) -> str:
        """The text that can be shown: without a tail that may still become a stop string."""
        if self._final or not self._stop:
            return self.text
        held = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return self.text[: len(self.text) - held]

    def _append(self, piece: str, may_stop: bool) -> str | None:
        before = len(self.text)
        self.text += piece
        if not piece or not may_stop:
            return None
        # a stop string must end in the new piece: what lies wholly before has been judged
        starts = ((self.text.find(s, max(0, before - len(s) + 1)), s) for s in self._stop)
        found = min((hit for hit in starts if hit[0] >= 0), default=None)
        if found is None:
            return None
        self.text, self._final = self.text[: found[0]], True
        return found[1]
