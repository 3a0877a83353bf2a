"""config= of one collective call: ncclCollConfig_t by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cliques import all_reduced, clique

import pynccl
from pynccl import ConfigError, NotSupportedError, testing

SETTINGS: dict[str, Any] = {
    "min_ctas": 1,
    "max_ctas": 4,
    "nvls_ctas": 2,
    "cga_cluster_size": 1,
    "cta_policy": 0,
    "profiler_tag": 7,
}
OPERATIONS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
)


@pytest.mark.parametrize("name", OPERATIONS)
async def test_each_collective_takes_them(temper: str, name: str) -> None:
    function = "nccl" + {"all_to_all": "AlltoAll"}.get(
        name, "".join(part.capitalize() for part in name.split("_"))
    )
    async with clique(2) as comms:
        with testing.journal() as journal:
            plain, tuned = [], []
            for config, results in ((None, plain), (SETTINGS, tuned)):
                xs = [np.arange(4, dtype=np.float32) + comm.rank for comm in comms]
                out: dict[str, Any] = (
                    {"out": np.zeros(2, np.float32)} if name == "scatter" else {}
                )
                works = [
                    getattr(c, name)(x, config=config, **(out if c.rank else {}))
                    for c, x in zip(comms, xs, strict=True)
                ]
                results.extend(await pynccl.wait(*works))
        for a, b in zip(plain, tuned, strict=True):
            assert (a is None and b is None) or a.tolist() == b.tolist()
        names = journal.nccl()
        assert names == [function] * 2 + [function + "Config"] * 2


async def test_an_algorithm(temper: str) -> None:
    async with clique(2) as comms:
        xs = [np.ones(4, np.float32) for _ in comms]
        works = [
            comm.all_reduce(x, config={"algorithm": "RING,TREE", "force_algorithm": True})
            for comm, x in zip(comms, xs, strict=True)
        ]
        await pynccl.wait(*works)
        assert xs[0].tolist() == [2] * 4
        with pytest.raises(ConfigError, match=r"ncclAllReduceConfig returned"):
            await comms[0].all_reduce(xs[0], config={"algorithm": "NONSENSE"})
        await all_reduced(comms)


async def test_in_a_group(temper: str) -> None:
    async with clique(2) as comms:
        xs = [np.ones(4, np.float32) for _ in comms]
        async with pynccl.group():
            for comm, x in zip(comms, xs, strict=True):
                comm.all_reduce(x, config={"max_ctas": 2})
        assert xs[1].tolist() == [2] * 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"min_cta": 1}, "a call has no setting 'min_cta'; it has min_ctas, max_ctas"),
        ({"min_ctas": "8"}, "call setting min_ctas must be an integer from 1 to 64, not '8'"),
        ({"max_ctas": 0}, "max_ctas must be an integer from 1 to 64, not 0"),
        ({"min_ctas": 8, "max_ctas": 4}, "min_ctas .8. is over max_ctas .4."),
        ({"force_algorithm": 2}, "force_algorithm must be an integer from 0 to 1"),
        ({"algorithm": 3}, "algorithm must be text, not 3"),
        ({"profiler_tag": 1 << 63}, "profiler_tag must be an integer"),
        ([("min_ctas", 1)], "config must be a mapping"),
    ],
)
async def test_what_is_no_setting(config: Any, message: str) -> None:
    async with clique(1) as comms:
        with testing.journal() as journal:
            with pytest.raises(ConfigError, match=message):
                comms[0].all_reduce(np.ones(4), config=config)
            assert journal.nccl() == []
        await all_reduced(comms)


async def test_a_library_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_ENGINE", "noop")
    async with clique(1) as comms:
        if comms[0].engine.has("ncclAllReduceConfig"):
            pytest.fail("the no-op engine has them: find another one without")
        with pytest.raises(NotSupportedError, match=r"ncclAllReduceConfig needs NCCL 2.31"):
            comms[0].all_reduce(np.ones(4), config={"max_ctas": 4})
        await comms[0].all_reduce(np.ones(4))
