"""A service whose handler runs a matrix product over two ranks.

It serves http://127.0.0.1:8000/product; with --drive it also sends itself requests, all at
once, and checks the answers::

    pip install starlette uvicorn httpx
    python examples/04_service.py --drive 64

The weight is split by rows between the ranks; each computes its part of x @ w, and an
all-reduce adds the parts. The handler is one coroutine among many: while its all-reduce is
under way the loop serves the others.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import pynccl

SIZE, RANKS = 256, 2


class Model:
    """x @ w with the rows of w divided among the ranks."""

    def __init__(self, comms: list[pynccl.Communicator]) -> None:
        self.comms = comms
        self.w = np.random.default_rng(1).standard_normal((SIZE, SIZE)).astype(np.float32)
        self.parts = np.split(self.w, RANKS)

    async def product(self, x: np.ndarray) -> np.ndarray:
        """The product for one row of SIZE numbers, the same on every rank; gives rank 0's."""
        halves = np.split(x, RANKS)
        ys = [half @ part for half, part in zip(halves, self.parts, strict=True)]
        # Calling issues: both ranks are in, whatever happens to the request from here on.
        works = [comm.all_reduce(y) for comm, y in zip(self.comms, ys, strict=True)]
        await pynccl.wait(*works)
        return ys[0]


def row(seed: int) -> np.ndarray:
    """The input that a request's seed stands for."""
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


async def product(request: Request) -> JSONResponse:
    """Answer GET /product?seed=N."""
    model: Model = request.app.state.model
    y = await model.product(row(int(request.query_params.get("seed", "0"))))
    return JSONResponse({"y": [float(value) for value in y[:8]]})


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """The communicators live as long as the service."""
    comms = await pynccl.create_all([f"cpu:{i}" for i in range(RANKS)])
    app.state.model = Model(comms)
    yield
    await asyncio.gather(*(comm.close() for comm in comms))


app = Starlette(routes=[Route("/product", product)], lifespan=lifespan)


async def lag(worst: list[float]) -> None:
    """How late a 1 ms sleep wakes up, at worst, in ms."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        worst[0] = max(worst[0], (time.perf_counter() - before) * 1e3 - 1)


async def client(port: int, requests: int) -> None:
    """Another process: many requests at once; every eighth is given up on the way."""
    model = Model([])

    async def ask(http: httpx.AsyncClient, seed: int) -> str:
        call = http.get(f"http://127.0.0.1:{port}/product", params={"seed": seed})
        try:
            answer = await asyncio.wait_for(call, 0.002 if seed % 8 == 7 else 30)
        except asyncio.TimeoutError:
            return "given up"
        expected = (row(seed) @ model.w)[:8]
        assert np.allclose(answer.json()["y"], expected, rtol=1e-3, atol=1e-3)
        return "right"

    limits = httpx.Limits(max_connections=requests)
    async with httpx.AsyncClient(limits=limits, timeout=30) as http:
        outcomes = await asyncio.gather(*(ask(http, seed) for seed in range(requests)))
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}, flush=True)


async def serve(port: int, requests: int) -> None:
    """Serve until interrupted, or until the client that this starts has done its requests."""
    config = uvicorn.Config(app, port=port, log_level="warning", loop="none")
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    if requests:
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        worst = [0.0]
        watch = asyncio.ensure_future(lag(worst))
        arguments = ["--client", str(requests), "--port", str(port)]
        driver = await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments)
        assert await driver.wait() == 0
        watch.cancel()
        print(f"worst loop lag: {worst[0]:.1f} ms", flush=True)
        server.should_exit = True
    await serving


async def main() -> None:
    """Serve, or be the client."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--drive", type=int, default=0, metavar="N", help="requests to send")
    parser.add_argument("--client", type=int, metavar="N", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        await client(arguments.port, arguments.client)
    else:
        await serve(arguments.port, arguments.drive)


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
