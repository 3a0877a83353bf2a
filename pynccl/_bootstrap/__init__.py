"""Bring the ranks of a job together, let them agree on a few bytes, and watch them afterwards.

Nothing here knows what the bytes are for. Arrows between the modules run down only:

    launcher, joining              which rank of how many am I; from an address to a Session
    session                        what stays: reports, losses, questions, the goodbye
    hub, client                    rank 0's side and everybody else's
    watch, door                    what rank 0 relays, and whom it lets in
    choice                         which board an address means
    boards, mpi, store             where rank 0 says which port it has
    channel, handshake, inherited  one connection; one proof of the secret; no sockets in forks
    verdict, address, frames, waiting, slurm   plain values, bytes and deadlines
"""

from pynccl._bootstrap.joining import join as join
from pynccl._bootstrap.launcher import Launch as Launch
from pynccl._bootstrap.launcher import locate as locate
from pynccl._bootstrap.launcher import read_launch as read_launch
from pynccl._bootstrap.session import Session as Session

__all__ = ["Launch", "Session", "join", "locate", "read_launch"]
