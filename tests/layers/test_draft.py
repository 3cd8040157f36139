"""The drafter over rings = the dense, cacheless drafter: to the bit in float64 accumulation."""

import functools

import pytest
import torch
from dsv41_reference import accumulate, keep_weights
from dsv41_reference.draft import V41ReferenceDraft
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv41.layers import V41Flash, V41State, weights
from dsv41.layers.draft import Biased, Drafter, MarkovHead
from dsv41.layers.linear import Weight
from dsv41.layers.weights import expected_tensors
from dsv41.ops.draft import DraftBlock
from dsv41.spec import Streams
from tests import models


@functools.cache
def drafter(kind: str) -> Drafter:
    mtp = models.drafting_model(kind).mtp
    assert mtp is not None
    return mtp


def rows(kind: str, length: int, seed: int = 0) -> torch.Tensor:
    """[length, input_width] bf16: what a target might have seen. The drafter needs no target."""
    draw = torch.Generator().manual_seed(seed)
    shape = (length, drafter(kind).input_width)
    return torch.randn(shape, generator=draw).to(torch.bfloat16)


def feed(kind: str, state: V41State, inputs: torch.Tensor, stays: int | None = None) -> None:
    """One request's target step over ``inputs``, of which the first ``stays`` rows are accepted."""
    start, count = int(state.lens[0]), len(inputs)
    state.lens[0] = start + (count if stays is None else stays)
    drafter(kind).write_context(inputs, models.positions(start, count), state)


def dense(
    kind: str, inputs: torch.Tensor, anchor: int, **options: object
) -> tuple[DraftBlock, dict[str, torch.Tensor]]:
    trace: dict[str, torch.Tensor] = {}
    reference = V41ReferenceDraft(models.config(kind), models.weights(kind))
    return DraftBlock(*reference.forward(inputs, anchor, trace=trace, **options)), trace  # type: ignore[arg-type]


def assert_same(got: DraftBlock, request: int, want: DraftBlock) -> None:
    assert got.logits is not None and want.logits is not None
    assert torch.equal(got.logits[request], want.logits), f"logits of request {request}"
    assert torch.equal(got.tokens[request], want.tokens), f"tokens of request {request}"
    assert torch.equal(got.confidence[request], want.confidence), f"confidence of request {request}"


def assert_rings(kind: str, state: V41State, request: int, trace: dict[str, torch.Tensor]) -> None:
    """Every row of the window that the rings hold is the dense drafter's."""
    cfg = models.config(kind)
    length = len(trace["ring.0"])
    place = torch.arange(max(0, length - cfg.window), length)
    for stage in range(cfg.draft.num_stages):
        ring = state.windows[cfg.num_layers + stage]
        got = ring.read(request * ring.page_size + place % ring.page_size)
        assert torch.equal(got, trace[f"ring.{stage}"][place].float()), f"ring of stage {stage}"


def check_chunks(
    kind: str = "micro", length: int = 21, cuts: tuple[int, ...] = (4, 1, 9), anchor: int = 5
) -> None:
    """Context in pieces, past the end of the ring; then one block."""
    inputs = rows(kind, length)
    state = V41State.allocate(models.config(kind), 1, length + 8, block=8, drafter=True)
    with accumulate(torch.float64):
        start = 0
        for size in (*cuts, length):
            feed(kind, state, inputs[start : start + size])
            start = min(start + size, length)
        got = drafter(kind)(torch.tensor([anchor]), state)
        want, trace = dense(kind, inputs, anchor)
    assert_same(got, 0, want)
    assert_rings(kind, state, 0, trace)


@pytest.mark.parametrize("kind", ["micro", "tiny"])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17, 60])
def test_equals_dense_at_every_context_length(kind: str, length: int) -> None:
    check_chunks(kind, length, ())


@settings(max_examples=15)
@given(st.lists(st.integers(1, 20), max_size=5), st.integers(1, 60), st.integers(0, 80))
def test_random_chunks_equal_dense(cuts: list[int], length: int, anchor: int) -> None:
    check_chunks("micro", length, tuple(cuts), anchor)


def check_rejected_rows(kind: str = "micro") -> None:
    """Rows of rejected drafts are never stored; the drafts of every step are the dense drafter's."""
    cfg, length = models.config(kind), 40
    inputs, wrong = rows(kind, length), rows(kind, length, seed=1)
    state = V41State.allocate(cfg, 1, length + 8, block=8, drafter=True)
    draw = torch.Generator().manual_seed(2)
    with accumulate(torch.float64):
        feed(kind, state, inputs[:11])
        while (start := int(state.lens[0])) < length - cfg.draft.block_size:
            stays = int(torch.randint(1, cfg.draft.block_size + 2, (), generator=draw))
            step = torch.cat(
                [inputs[start : start + stays], wrong[start : start + cfg.draft.block_size + 1 - stays]]
            )
            before = [ring.pages.clone() for ring in state.windows]
            feed(kind, state, step, stays)
            ring = state.windows[-1].page_size
            rejected = torch.arange(start + stays, start + len(step)) % ring
            for was, now in zip(before, state.windows, strict=True):
                assert torch.equal(was[0, rejected], now.pages[0, rejected])
            got = drafter(kind)(torch.tensor([9]), state)
            want, _ = dense(kind, inputs[: start + stays], 9)
            assert_same(got, 0, want)


def test_rejected_rows_leave_no_trace() -> None:
    check_rejected_rows()


def check_batch(kind: str = "tiny") -> None:
    """Requests of several lengths, one that does not draft, padding rows: each is as if alone."""
    cfg, lengths, anchors = models.config(kind), [33, 0, 5, 17], [7, 3, -1, 499]
    contexts = [rows(kind, n, seed=n) for n in lengths]
    state = V41State.allocate(cfg, len(lengths), 64, block=8, drafter=True)
    with accumulate(torch.float64):
        for first in (True, False):
            pieces = [c[:8] if first else c[8:] for c in contexts]
            starts = [0 if first else min(8, n) for n in lengths]
            cu = torch.tensor([0, *map(len, pieces)]).cumsum(0).to(torch.int32)
            place = torch.cat([models.positions(s, len(p)) for s, p in zip(starts, pieces, strict=True)])
            padded = torch.cat([*pieces, rows(kind, 2, seed=99)])
            state.lens.add_(cu[1:] - cu[:-1])
            place = torch.cat([place, models.positions(0, 2)])
            drafter(kind).write_context(padded, place, state, cu_seqlens=cu)
        before = [ring.pages.clone() for ring in state.windows]
        got = drafter(kind)(torch.tensor(anchors), state)
        for was, now in zip(before, state.windows, strict=True):
            assert torch.equal(was, now.pages), "drafting writes into the state"
        for r, (context, anchor) in enumerate(zip(contexts, anchors, strict=True)):
            if anchor < 0:
                assert got.tokens[r].eq(-1).all()
                continue
            want, trace = dense(kind, context, anchor)
            assert_same(got, r, want)
            assert_rings(kind, state, r, trace)


def test_batch_equals_dense() -> None:
    check_batch()


def test_poisoned_memory_never_shows() -> None:
    state = V41State.allocate(models.config("micro"), 1, 32, block=8, drafter=True)
    for ring in state.windows:
        ring.pages.fill_(0x7F)
    with accumulate(torch.float64):
        feed("micro", state, rows("micro", 3))
        got = drafter("micro")(torch.tensor([4]), state)
        assert_same(got, 0, dense("micro", rows("micro", 3), 4)[0])


def check_behind_the_target(kind: str = "tiny") -> None:
    """The rows come from the target: streams that enter the target layers."""
    ids, model = models.text(kind, 30), models.drafting_model(kind)
    state = V41State.allocate(models.config(kind), 1, 40, block=8, drafter=True)
    inputs = torch.empty((len(ids), drafter(kind).input_width), dtype=torch.bfloat16)
    with accumulate(torch.float64):
        logits = model(ids, models.positions(0, len(ids)), state, draft_inputs=inputs)
        drafter(kind).write_context(inputs, models.positions(0, len(ids)), state)
        anchor = logits[-1:].argmax(-1)
        got = drafter(kind)(anchor, state)
        trace: dict[str, torch.Tensor] = {}
        models.reference(kind).forward(ids, trace=trace)
        targets = torch.cat([trace[f"target.{i}"] for i in models.config(kind).draft.target_layers], 1)
        want, _ = dense(kind, targets, int(anchor))
    assert_same(got, 0, want)


def test_behind_the_target() -> None:
    check_behind_the_target()


def check_sampling(kind: str = "micro") -> None:
    """Each draft is drawn from its row's logits, and the rows behind it follow the drawn token."""
    inputs, anchor, heat = rows(kind, 12), 3, torch.tensor([0.7])
    streams = Streams.of([11], [5])
    state = V41State.allocate(models.config(kind), 1, 32, block=8, drafter=True)

    def sample(z: torch.Tensor, column: int) -> torch.Tensor:
        return streams.draft(z, column, state.lens.long(), heat)

    with accumulate(torch.float64):
        feed(kind, state, inputs)
        got = drafter(kind)(torch.tensor([anchor]), state, sample)
        drawn = iter(got.tokens[0].tolist())
        want, _ = dense(kind, inputs, anchor, temperature=0.7, sample=lambda law: next(drawn))
    assert_same(got, 0, want)
    assert got.logits is not None
    assert got.tokens[0].tolist() == [int(sample(got.logits[:, i], i)) for i in range(got.tokens.shape[1])]
    assert got.tokens[0].tolist() != got.logits[0].argmax(-1).tolist()


def test_sampling_inside_the_block() -> None:
    check_sampling()


def test_a_row_without_a_law_ends_the_drafts() -> None:
    state = V41State.allocate(models.config("micro"), 1, 32, block=8, drafter=True)
    model = models.build("micro", drafter=True)
    assert model.mtp is not None
    model.get_parameter("mtp.1.markov_head.head.weight").fill_(torch.nan)
    assert model.mtp(torch.tensor([4]), state).tokens.tolist() == [[-1] * model.mtp.block_size]


def perturb(tensor: torch.Tensor) -> None:
    """Another value everywhere: the sign of numbers, a power of two for scales, the choice for the router."""
    code = tensor.view(torch.uint8)
    if tensor.dtype == torch.float8_e8m0fnu:
        code.view(-1)[::2] += 1  # not everywhere: a norm behind it would hide a common factor
    elif tensor.dtype in (torch.int8, torch.uint8):
        code ^= 0x88
    elif tensor.element_size() == 1:
        code ^= 0x80
    else:
        step = torch.arange(tensor.numel()).view(tensor.shape) % 7
        tensor.copy_(-tensor - 0.5 * step)


def test_every_tensor_takes_part() -> None:
    """Changing any one ``mtp.*`` tensor changes logits or confidences; only the image bias does not."""
    kind = "tiny"
    cfg, model = models.config(kind), models.build(kind, drafter=True)
    assert model.mtp is not None
    views = {name: view for name, view in model.checkpoint_tensors().items() if name.startswith("mtp.")}
    assert views.keys() == {name for name in expected_tensors(cfg) if name.startswith("mtp.")}
    requests, length = 6, 4
    inputs = torch.cat([rows(kind, length, seed=r) for r in range(requests)])
    cu = torch.arange(0, requests * length + 1, length, dtype=torch.int32)

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        assert model.mtp is not None
        state = V41State.allocate(cfg, requests, 16, block=8, drafter=True)
        state.lens.add_(length)
        model.mtp.write_context(inputs, models.positions(0, length).repeat(requests), state, cu_seqlens=cu)
        block = model.mtp(torch.arange(20, 20 + requests), state)
        assert block.logits is not None
        return block.logits, block.confidence

    for stage in range(cfg.draft.num_stages):
        views[f"mtp.{stage}.ffn.gate.bias"].zero_()  # every expert gets rows
    want = outputs()
    silent = []
    for name, view in views.items():
        before = view.clone()
        perturb(view)
        if all(torch.equal(a, b) for a, b in zip(outputs(), want, strict=True)):
            silent.append(name)
        view.view(torch.uint8).copy_(before.view(torch.uint8))
    assert silent == [f"mtp.{i}.ffn.gate.bias_vl" for i in range(cfg.draft.num_stages)]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_head_in_closed_form(kind: str) -> None:
    """Two rows of two requests against the formulas in float64; a block starts without memory."""
    torch.manual_seed(3)
    vocab, hidden, rank = 40, 24, 8
    head = MarkovHead(vocab, hidden, rank, kind)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    base, h = torch.randn(2, 2, vocab), torch.randn(2, 2, hidden).to(torch.bfloat16)
    previous = torch.tensor([[3, 7], [39, 0]])
    s, wanted = head.start(2), torch.zeros(2, rank, dtype=torch.float64)
    for row in range(2):
        e = head.lookup(previous[:, row])
        logits = base[row].clone()
        s = head(logits, e, h[row], s)
        f, d = e.double(), h[row].double()

        def linear(part: Biased, *x: torch.Tensor) -> torch.Tensor:
            return torch.cat(x, 1) @ part.weight.double().T + part.bias.double()

        if kind == "gated":
            f = torch.sigmoid(linear(head.gate, d, f)) * f
        if kind == "rnn":
            g, c, o = linear(head.joint, wanted, f, d).chunk(3, 1)
            wanted = torch.sigmoid(g) * wanted + (1 - torch.sigmoid(g)) * torch.tanh(c)
            f = torch.tanh(o)
        want = base[row].double() + f @ head.head.weight.double().T
        bound = 1e-6 if kind == "vanilla" else 1e-2
        torch.testing.assert_close(logits.double(), want, rtol=bound, atol=bound)
        if kind == "rnn":
            torch.testing.assert_close(s.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_other_markov_heads_draft(kind: str) -> None:
    """The optional forms run inside the drafter and look at the token before."""
    cfg, model = models.config("micro"), models.drafting_model("micro")
    other = Drafter(cfg, model.embed, model.head, kind)
    assert model.mtp is not None
    torch.manual_seed(0)
    for name, parameter in other.named_parameters():
        if "markov_head.gate" in name or "markov_head.joint" in name:
            parameter.copy_(torch.randn(parameter.shape))
        else:
            source = model.mtp.get_parameter(name)
            parameter.view(torch.uint8).copy_(source.view(torch.uint8))
    state = V41State.allocate(cfg, 1, 16, block=8, drafter=True)
    forced = [other(torch.tensor([4]), state, lambda z, i, t=t: torch.tensor([t])).logits for t in (1, 2)]
    assert forced[0] is not None and forced[1] is not None
    assert torch.equal(forced[0][:, 0], forced[1][:, 0]) and not torch.equal(forced[0][:, 1], forced[1][:, 1])


def test_load_fills_the_drafter(tmp_path) -> None:
    cfg = models.config("micro")
    weights.write_synthetic(cfg, tmp_path, models.SEED)
    model = V41Flash(cfg, drafter=True)
    report = weights.load(model, tmp_path, progress=False)
    names = {name for name in report.loaded if name.startswith("mtp.")}
    assert names == {name for name in expected_tensors(cfg) if name.startswith("mtp.")} and not report.skipped
    for name, view in model.checkpoint_tensors().items():
        assert torch.equal(view.view(torch.uint8), models.weights("micro")[name].view(torch.uint8)), name
    assert not any(name.startswith("mtp.") for name in V41Flash(cfg).checkpoint_tensors())


def test_no_host_sync() -> None:
    cfg = models.config("micro")
    with FakeTensorMode():
        mtp = Drafter(cfg, Weight(cfg.vocab_size, cfg.hidden), Weight(cfg.vocab_size, cfg.hidden))
        state = V41State.allocate(cfg, 2, 16, block=8, drafter=True)
        inputs = torch.empty((6, mtp.input_width), dtype=torch.bfloat16)
        place, cu = torch.zeros(6, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        mtp.write_context(inputs, place, state, cu_seqlens=cu)
        block = mtp(torch.zeros(2, dtype=torch.int64), state)
        assert block.tokens.shape == (2, cfg.draft.block_size)


def test_no_requests() -> None:
    cfg = models.config("micro")
    state = V41State.allocate(cfg, 0, 16, block=8, drafter=True)
    block = drafter("micro")(torch.empty(0, dtype=torch.int64), state)
    assert block.tokens.shape == (0, cfg.draft.block_size) and block.confidence.shape == block.tokens.shape


def test_callers_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, mtp = models.config("micro"), drafter("micro")
    state = V41State.allocate(cfg, 2, 16, block=8, drafter=True)
    anchors, inputs, place = torch.zeros(2, dtype=torch.int64), rows("micro", 2), models.positions(0, 2)
    with pytest.raises(ValueError, match=r"Drafter: expected 8 windows \(drafter=True\), got 6"):
        mtp(anchors, V41State.allocate(cfg, 2, 16, block=8))
    with pytest.raises(ValueError, match="Drafter: expected a state of the same config, got another"):
        mtp(anchors, V41State.allocate(models.config("tiny"), 2, 16, drafter=True))
    with pytest.raises(ValueError, match=r"Drafter: expected anchors: \[2\] int64, got"):
        mtp(anchors[:1], state)
    with pytest.raises(
        ValueError, match=r"Drafter.write_context: expected inputs: \[\*, 128\] bfloat16, got"
    ):
        mtp.write_context(inputs[:, :-1].contiguous(), place, state)
    with pytest.raises(
        ValueError, match=r"Drafter.write_context: expected cu_seqlens: \[3\] int32, got None"
    ):
        mtp.write_context(inputs, place, state)
    for drawn in (None, anchors[:1], anchors.float(), anchors[:, None]):
        with pytest.raises(
            ValueError, match=r"Drafter: expected what sample returns: \[2\] int64\|int32, got"
        ):
            mtp(anchors, state, lambda z, column, drawn=drawn: drawn)  # pyright: ignore
    monkeypatch.setenv("DSV41_CHECK", "1")
    vocab = cfg.vocab_size  # a row past the table: on a device it would be read from anywhere
    with pytest.raises(ValueError, match=rf"Drafter: expected anchors below {vocab}"):
        mtp(anchors + vocab, state)
    with pytest.raises(ValueError, match=rf"Drafter: expected what sample returns below {vocab}"):
        mtp(anchors, state, lambda z, column: anchors + vocab)
    with pytest.raises(ValueError, match="MarkovHead: expected kind: one of vanilla, gated, rnn, got other"):
        MarkovHead(8, 8, 8, "other")


def test_kept_weights_change_nothing() -> None:
    with keep_weights():
        check_chunks()
