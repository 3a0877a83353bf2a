"""Which notice board an address means."""

from __future__ import annotations

from pynccl._bootstrap.address import Address, File, Mpi, Store, Tcp
from pynccl._bootstrap.boards import Board, FileBoard, FixedBoard


def board_for(address: Address, *, rank: int, size: int) -> Board:
    """Return the board of an address; the optional libraries are imported when first used."""
    if isinstance(address, Tcp):
        return FixedBoard(address)
    if isinstance(address, File):
        return FileBoard(address)
    if isinstance(address, Mpi):
        from pynccl._bootstrap.mpi import MpiBoard

        return MpiBoard(rank=rank, size=size)
    assert isinstance(address, Store)
    from pynccl._bootstrap.store import StoreBoard

    return StoreBoard(address)
