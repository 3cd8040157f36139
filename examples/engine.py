"""A continuous-batching engine over dsv41 in about a hundred lines: pages, admission, chunked prefill,
decode, preemption, cancellation. Greedy, one device, no server. Run it: ``python examples/engine.py``.

The engine's: requests, pages, which rows a step has. dsv41's: everything that a step computes.
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from dsv41.layers import V41Flash, V41State


@dataclass(eq=False)
class Request:
    """prompt and new are token ids; ``slot`` is its place in the state, -1 while it waits."""

    prompt: list[int]
    max_new: int
    new: list[int] = field(default_factory=list)
    slot: int = -1
    held: int = 0  # tokens that the caches hold
    pages: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.new

    @property
    def done(self) -> bool:
        return len(self.new) == self.max_new


class Engine:
    """One batch of at most ``slots`` requests over ``pages`` pages of ``block`` tokens each."""

    def __init__(
        self, model: V41Flash, *, slots: int, pages: int, max_tokens: int, block: int = 64, chunk: int = 256
    ):
        device = model.embed.weight.device
        self.model, self.chunk, self.block, self.device = model, chunk, block, device
        self.state = V41State.allocate(model.cfg, slots, max_tokens, block=block, pages=pages, device=device)
        self.free_pages, self.free_slots, self.num_pages = list(range(pages)), list(range(slots)), pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first: the youngest gives its pages back

    def submit(self, prompt: list[int], max_new: int) -> Request:
        """Queue a request. What could never run is refused here and not in the middle of a step."""
        need = len(prompt) + max_new - 1
        room = min(self.state.capacity, self.num_pages * self.block)
        if not prompt or max_new < 1 or need > room:
            raise ValueError(f"submit: expected 1 to {room} tokens of prompt and text, got {need}")
        self.waiting.append(request := Request(list(prompt), max_new))
        return request

    def cancel(self, request: Request) -> None:
        """Forget a request, also between two of its steps."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._release(request)

    def step(self) -> list[Request]:
        """Run one step; returns the requests that ended in it."""
        while self.waiting and self.free_slots and self.free_pages:
            request = self.waiting.popleft()
            request.slot = self.free_slots.pop()
            self.state.reset(request.slot)
            self.running.append(request)
        rows = self._schedule()
        if not rows:
            return []
        batch = sorted(rows, key=lambda r: r.slot)  # rows of a step lie in the order of the state
        counts = torch.zeros(self.state.num_requests + 1, dtype=torch.int32)
        tokens, positions = [], []
        for request in batch:
            stop = request.held + rows[request]
            tokens += request.text[request.held : stop]
            positions += range(request.held, stop)
            counts[request.slot + 1] = rows[request]
            request.held = stop
        cu_seqlens = counts.cumsum(0, dtype=torch.int32)
        ends = [r for r in batch if r.held == len(r.text)]  # those that know all tokens before the next
        last = [int(cu_seqlens[r.slot + 1]) - 1 for r in ends]
        logits = self.model(
            torch.tensor(tokens, dtype=torch.int32, device=self.device),
            torch.tensor(positions, dtype=torch.int32, device=self.device),
            self.state,
            cu_seqlens=cu_seqlens.to(self.device),
            max_len=max(rows.values()),
            rows=torch.tensor(last, dtype=torch.int64, device=self.device),
        )
        for request, token in zip(ends, logits.argmax(1).tolist(), strict=True):  # the step's only wait
            request.new.append(token)
        finished = [r for r in ends if r.done]
        for request in finished:
            self._release(request)
        return finished

    def _schedule(self) -> dict[Request, int]:
        """Rows of each request, pages assigned: one for decode, up to ``chunk`` in all for prompts."""
        rows: dict[Request, int] = {}
        left = self.chunk
        for request in list(self.running):
            want = len(request.text) - request.held
            count = want if want == 1 else min(want, left)
            if request.slot < 0 or not count or not self._grow(request, request.held + count):
                continue
            left -= count if want > 1 else 0
            rows[request] = count
        return rows

    def _grow(self, request: Request, length: int) -> bool:
        """Pages for ``length`` tokens; takes them from younger requests, which then start again."""
        while len(request.pages) * self.block < length:
            if not self.free_pages:
                youngest = self.running[-1]
                if youngest is request:
                    return False  # older requests go on, and give pages back when they end
                self._release(youngest)
                self.waiting.appendleft(youngest)
                continue
            page = self.free_pages.pop()
            self.state.page_table[request.slot, len(request.pages)] = page
            request.pages.append(page)
        return True

    def _release(self, request: Request) -> None:
        self.state.page_table[request.slot] = -1
        self.free_pages += request.pages
        self.free_slots.append(request.slot)
        self.running.remove(request)
        request.slot, request.held, request.pages = -1, 0, []


def main() -> None:
    """Serve a few random prompts with a narrow model of random weights."""
    from dsv41 import V41FlashConfig
    from dsv41.bench.cpu import synthetic_model

    cfg = V41FlashConfig.tiny()
    engine = Engine(synthetic_model(cfg), slots=3, pages=8, max_tokens=256, block=32, chunk=64)
    torch.manual_seed(0)
    for length in (70, 9, 33):
        engine.submit(torch.randint(0, cfg.image_token, (length,)).tolist(), max_new=4)
    step = 0
    while engine.running or engine.waiting:
        for request in engine.step():
            print(f"step {step}: {len(request.prompt)} prompt tokens -> {request.new}")
        step += 1


if __name__ == "__main__":
    main()
