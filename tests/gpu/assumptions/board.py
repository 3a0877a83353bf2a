"""Where the ranks of a case meet without NCCL: a folder of small files."""

from __future__ import annotations

import time
from pathlib import Path

NAP_S = 0.0005


class Board:
    """One rank's view of the folder; works between threads and between processes."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder = folder
        self.rank = rank
        self.ranks = ranks
        self._meetings = 0

    def say(self, word: str, text: str = "") -> None:
        """Let the others read a text under a word; each word once."""
        fresh = self.folder / f".{word}-{self.rank}"
        fresh.write_text(text)
        fresh.replace(self._place(word, self.rank))

    def hear(self, word: str, rank: int) -> str:
        """Wait until another rank has said a word, and give its text."""
        place = self._place(word, rank)
        while not place.exists():
            time.sleep(NAP_S)
        return place.read_text()

    def meet(self) -> None:
        """Wait until all ranks are here; good to about a millisecond."""
        self._meetings += 1
        word = f"meeting{self._meetings}"
        self.say(word)
        for rank in range(self.ranks):
            self.hear(word, rank)

    def _place(self, word: str, rank: int) -> Path:
        return self.folder / f"{word}-{rank}"
