"""Ranks as processes over gloo or NCCL, each with a deadline: nothing here can hang the suite."""

import datetime
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

STORE = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
LIMIT = 120.0  # seconds for all ranks of one call, start included; some seconds are usual


def _main(
    work: Callable[..., Any], rank: int, size: int, port: int, pipe: Any, backend: str, args: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    patience = datetime.timedelta(seconds=60)
    store = STORE("127.0.0.1", port, size + 1, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    from dsv41.ops.exchange import GroupTransport

    group = dist.group.WORLD
    assert group is not None
    try:
        pipe.send(("done", work(GroupTransport(group, store), *args)))
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))
    pipe.close()
    # A group whose peer died cannot be taken down in order.
    os._exit(0)


def on_processes(size: int, work: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """``work(transport, *args)`` on every rank, a function of a module; a result or (error, text) a rank, and
    None for a rank that died. With NCCL rank r has GPU r.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dsv41.layers.model", "dsv41.eplb", "tests.ep.jobs"])
    store = STORE("127.0.0.1", 0, size + 1, is_master=True, wait_for_workers=False)
    deadline, ranks = time.monotonic() + LIMIT, []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_main, args=(work, rank, size, store.port, theirs, backend, args), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    results: list[Any] = []
    for process, pipe in ranks:
        try:
            there = pipe.poll(max(0.0, deadline - time.monotonic()))
            kind, value = pipe.recv() if there else ("hangs", f"no answer within {LIMIT:g} s")
            results.append(value if kind == "done" else (kind, value))
        except EOFError:
            results.append(None)
        process.join(max(0.1, deadline - time.monotonic()))
    for process, _ in ranks:
        if process.is_alive():
            process.kill()
    return results
