"""The CUDA emulator computes what the kernels ask for and catches planted faults."""

import pytest
import torch

from dsv41.ops._tilelang import device_source

from .cuda_emu import SHARED, EmulationError, available, emulate

pytestmark = pytest.mark.skipif(not available(), reason="needs g++")

# out[64, N] = A[64, K] B[N, K]^T; A through shared memory (ss) or registers (rs); stages of 128 bytes of k.
GEMM = """
using namespace hopper;
template <int N, int K, bool RS, bool FP8>
__device__ void gemm(const void* a_, const void* b_, float* out, void* shared) {
  constexpr int EL = FP8 ? 1 : 2, STEPS = K * EL / 128;
  uint8_t* smem = static_cast<uint8_t*>(shared);
  uint64_t* full = reinterpret_cast<uint64_t*>(smem);
  uint8_t *sa = smem + 1024, *sb = sa + 64 * 128;
  const uint8_t *a = static_cast<const uint8_t*>(a_), *b = static_cast<const uint8_t*>(b_);
  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  float d[N / 2];
  for (int step = 0; step < STEPS; ++step) {
    __syncthreads();  // SYNC
    for (int i = t; i < 64 * 8; i += 128)
      copy_16(sa + swizzle_128(i / 8, i % 8), a + (i / 8) * K * EL + step * 128 + i % 8 * 16, true);
    for (int i = t; i < N * 8; i += 128)
      copy_16(sb + swizzle_128(i / 8, i % 8), b + (i / 8) * K * EL + step * 128 + i % 8 * 16, true);
    copy_commit();
    copy_wait<0>();
    fence_async();
    __syncthreads();
    uint32_t r[4][4];
    for (int k = 0; k < 4; ++k)
      for (int j = 0; j < 4; ++j) {
        const int row = 16 * warp + lane / 4 + 8 * (j & 1), byte = 32 * k + 4 * (lane % 4) + 16 * (j >> 1);
        r[k][j] = *reinterpret_cast<uint32_t*>(sa + swizzle_128(row, byte / 16) + byte % 16);
      }
    wgmma_fence();
    for (int k = 0; k < 4; ++k) {
      const uint64_t da = tile_descriptor(smem_address(sa) + 32 * k);
      const uint64_t db = tile_descriptor(smem_address(sb) + 32 * k);
      const int add = step + k > 0;
      if constexpr (FP8) {
        if constexpr (RS) wgmma_e4m3_rs(d, r[k], db, add); else wgmma_e4m3_ss(d, da, db, add);
      } else {
        if constexpr (RS) wgmma_bf16_rs(d, r[k], db, add); else wgmma_bf16_ss(d, da, db, add);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    keep(d);
  }
  for (int i = 0; i < N / 2; ++i)
    out[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = d[i];
}
"""


def run_gemm(
    source: str, rs: bool, fp8: bool, n: int = 24, k: int = 256
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(rows, k).bfloat16() for rows in (64, n))
    if fp8:
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    kind, form = ("e4m3" if fp8 else "bf16"), ("rs" if rs else "ss")
    text = device_source(wgmma={f"{kind}_{form}": (n,)}) + source
    out = torch.zeros(64, n)
    call = f"gemm<{n}, {k}, {str(rs).lower()}, {str(fp8).lower()}>"
    emulate(text, call, [a, b, out, SHARED], grid=1, threads=128, shared_bytes=1024 + (64 + n) * 128)
    return out, a.float() @ b.float().T


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("rs", [False, True], ids=["ss", "rs"])
def test_wgmma_multiplies(rs: bool, fp8: bool) -> None:
    got, want = run_gemm(GEMM, rs, fp8)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


FAULTS = {
    "missing wgmma wait": ("wgmma_wait<0>();", "", "before wgmma_wait|ended before"),
    "missing copy wait": ("copy_wait<0>();", "", "in flight"),
    "missing proxy fence": ("fence_async();", "", "without fence_async"),
    "missing register fence": ("wgmma_fence();", "", "wgmma_fence"),
    "missing barrier": ("    __syncthreads();  // SYNC\n", "", "without a barrier|before wgmma_wait"),
    "no barrier after the copies": (
        "fence_async();\n    __syncthreads();",
        "fence_async();",
        "without a barrier|in flight|never written",
    ),
    "shared memory too small": ("sb = sa + 64 * 128", "sb = sa + 65 * 128", "which has"),
    "rows past the tensor": ("i < N * 8", "i < N * 8 + 8", "outside global memory|which has"),
    "unaligned copy": (
        "% 8 * 16, true);\n    copy_commit",
        "% 8 * 16 + 4, true);\n    copy_commit",
        "aligned",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported(fault: str) -> None:
    old, new, message = FAULTS[fault]
    assert old in GEMM
    with pytest.raises(EmulationError, match=message):
        run_gemm(GEMM.replace(old, new, 1), rs=False, fp8=False)


@pytest.mark.parametrize(
    "old, new",
    [
        ("tile_descriptor(smem_address(sb) + 32 * k)", "tile_descriptor(smem_address(sb))"),
        ("sb + swizzle_128(i / 8, i % 8)", "sb + i * 16"),
    ],
)
def test_wrong_layouts_change_the_result(old: str, new: str) -> None:
    assert old in GEMM
    got, want = run_gemm(GEMM.replace(old, new, 1), rs=False, fp8=False)
    assert not torch.allclose(got, want, rtol=1e-2, atol=1e-2)


# B in memory as [K, N]: the transposing form of the second operand.
TRANSPOSED = """
using namespace hopper;
template <int N>
__device__ void gemm(const void* a_, const void* b_, float* out, void* shared) {
  uint8_t *sa = static_cast<uint8_t*>(shared), *sb = sa + 64 * 128;
  const uint8_t *a = static_cast<const uint8_t*>(a_), *b = static_cast<const uint8_t*>(b_);
  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  for (int i = t; i < 64 * 8; i += 128)
    *reinterpret_cast<uint4*>(sa + swizzle_128(i / 8, i % 8)) = *reinterpret_cast<const uint4*>(a + i * 16);
  for (int tile = 0; tile < N / 64; ++tile)
    for (int i = t; i < 64 * 8; i += 128)
      *reinterpret_cast<uint4*>(sb + tile * 8192 + swizzle_128(i / 8, i % 8)) =
          *reinterpret_cast<const uint4*>(b + i / 8 * N * 2 + tile * 128 + i % 8 * 16);
  fence_async();
  __syncthreads();
  float d[N / 2];
  wgmma_fence();
  for (int k = 0; k < 4; ++k)
    wgmma_bf16_ss_t(d, tile_descriptor(smem_address(sa) + 32 * k),
                    tile_descriptor(smem_address(sb) + 2048 * k, 8192, 1024), k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < N / 2; ++i)
    out[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = d[i];
}
"""


def test_wgmma_with_a_transposed_operand() -> None:
    a, b, out = torch.randn(64, 64).bfloat16(), torch.randn(64, 128).bfloat16(), torch.zeros(64, 128)
    text = device_source(wgmma={"bf16_ss_t": (128,)}) + TRANSPOSED
    emulate(text, "gemm<128>", [a, b, out, SHARED], grid=1, threads=128, shared_bytes=3 * 8192)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-4)


# A producer warp feeds bulk copies through two stages to a consumer warp that adds up the rows.
PIPELINE = """
using namespace hopper;
__device__ void sums(const float* x, float* out, int rows, void* shared) {
  uint64_t *full = static_cast<uint64_t*>(shared), *empty = full + 2;
  float* stage = static_cast<float*>(shared) + 256;
  const int t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < 2; ++i) barrier_init(full + i, 1), barrier_init(empty + i, 32);
    fence_barrier_init();
  }
  __syncthreads();
  if (t < 32) {
    float sum = 0;
    for (int r = 0; r < rows; ++r) {
      const int s = r % 2, parity = r / 2 % 2;
      barrier_wait(full + s, parity);
      sum += stage[s * 32 + t];
      barrier_arrive(empty + s);
    }
    out[t] = sum;
  } else if (t == 32) {
    for (int r = 0; r < rows; ++r) {
      const int s = r % 2, parity = r / 2 % 2;
      barrier_wait(empty + s, parity ^ 1);
      barrier_expect(full + s, 128);
      bulk_copy(stage + s * 32, x + r * 32, 128, full + s);
    }
  }
}
"""


def run_pipeline(source: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randn(7, 32), torch.zeros(32)
    emulate(device_source() + source, "sums", [x, out, 7, SHARED], grid=1, threads=64, shared_bytes=2048)
    want = torch.zeros(32)
    for row in x:
        want += row
    return out, want


def test_barriers_pass_stages_on() -> None:
    got, want = run_pipeline(PIPELINE)
    assert torch.equal(got, want)


PIPELINE_FAULTS = {
    "the consumer does not wait": ("barrier_wait(full + s, parity);", "", "in flight|never written"),
    "the producer does not wait": (
        "barrier_wait(empty + s, parity ^ 1);",
        "",
        "after a read|in flight|more arrivals",
    ),
    "the consumer frees too early": (
        "sum += stage[s * 32 + t];\n      barrier_arrive(empty + s);",
        "barrier_arrive(empty + s);\n      sum += stage[s * 32 + t];",
        "after a read|in flight",
    ),
    "nobody frees": ("barrier_arrive(empty + s);", "", "deadlock"),
    "too few bytes announced": ("barrier_expect(full + s, 128)", "barrier_expect(full + s, 112)", "deadlock"),
    "no fence of the barriers": ("fence_barrier_init();", "", "fence_barrier_init"),
    "wrong parity": (
        "barrier_wait(full + s, parity);",
        "barrier_wait(full + s, parity ^ 1);",
        "in flight|never written|deadlock",
    ),
}


@pytest.mark.parametrize("fault", PIPELINE_FAULTS)
def test_pipeline_faults_are_reported(fault: str) -> None:
    old, new, message = PIPELINE_FAULTS[fault]
    assert old in PIPELINE
    with pytest.raises(EmulationError, match=message):
        run_pipeline(PIPELINE.replace(old, new, 1))


def test_warp_functions() -> None:
    source = """
__device__ void body(const int* x, int* out) {
  const int t = threadIdx.x, v = x[t];
  int* o = out + t * 10;
  o[0] = __shfl_sync(~0u, v, 5);
  o[1] = __shfl_xor_sync(~0u, v, 3);
  o[2] = __shfl_up_sync(~0u, v, 1);
  o[3] = __shfl_down_sync(~0u, v, 2, 8);
  o[4] = __ballot_sync(~0u, v & 1);
  o[5] = __match_any_sync(~0u, v % 3);
  o[6] = __popc(v) + __clz(v) + __ffs(v);
  o[7] = __brev(v) >> 24;
  o[8] = __byte_perm(0x33221100, 0x77665544, v & 0x7777);
  o[9] = hopper::transpose_8x8(t | (t + 32) << 16) & 0xFF;
}"""
    x = torch.arange(32, dtype=torch.int32) * 7 % 31 + 1
    out = torch.zeros(32, 10, dtype=torch.int32)
    emulate(device_source() + source, "body", [x, out], grid=1, threads=32)
    v = x.tolist()
    lane = torch.arange(32)
    assert out[:, 0].eq(v[5]).all() and torch.equal(out[:, 1], x[lane ^ 3])
    assert out[:, 2].tolist() == [v[0], *v[:31]]
    assert out[:, 3].tolist() == [v[i + 2] if i % 8 < 6 else v[i] for i in range(32)]
    ballot = sum((n & 1) << i for i, n in enumerate(v))
    assert (out[:, 4].long() & 0xFFFFFFFF).eq(ballot).all()
    match = [sum((m % 3 == n % 3) << i for i, m in enumerate(v)) for n in v]
    assert (out[:, 5].long() & 0xFFFFFFFF).tolist() == match
    low = [(n & -n).bit_length() for n in v]
    assert out[:, 6].tolist() == [
        n.bit_count() + 32 - n.bit_length() + f for n, f in zip(v, low, strict=True)
    ]
    assert out[:, 7].tolist() == [int(f"{n:032b}"[::-1], 2) >> 24 for n in v]
    assert out[:, 9].tolist() == [8 * (i % 4) + i // 8 + 32 * (i // 4 % 2) for i in range(32)]


def test_conversions_round_as_torch_does() -> None:
    source = """
#include <cuda_bf16.h>
#include <cuda_fp8.h>
__device__ void body(const float* x, uint16_t* bf, uint16_t* half_, uint8_t* fp8) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  bf[i] = __bfloat16_as_ushort(__float2bfloat16(x[i]));
  half_[i] = __half_as_ushort(__float2half(x[i]));
  fp8[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3);
}"""
    bits = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    sweep = torch.linspace(-500, 500, 4096)
    ties = torch.arange(4096).float() / 512 * 17
    x = torch.cat([bits.view(torch.float32).nan_to_num(nan=1.0), sweep, ties])
    bf, half, fp8 = (torch.zeros(len(x), dtype=d) for d in (torch.bfloat16, torch.float16, torch.uint8))
    emulate(device_source() + source, "body", [x, bf, half, fp8], grid=len(x) // 256, threads=256)
    assert torch.equal(bf, x.bfloat16()) and torch.equal(half, x.half())
    assert torch.equal(
        fp8.view(torch.float8_e4m3fn).float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    )


@pytest.mark.parametrize("schedule", ["first", "last"])
def test_a_warp_runs_ahead(schedule: str) -> None:
    """How many arrivals of a round each warp of four sees before the barrier: who is ahead only its own."""
    source = """
__device__ void body(int* out, int* count) {
  const int t = threadIdx.x, warp = t / 32, group = warp / 4;
  if (t % 128 == 0) count[group] = 0;
  __syncthreads();
  for (int round = 0; round < 3; ++round) {
    if (t % 32 == 0) atomicAdd(&count[group], 1);
    for (int i = 0; i < warp; ++i) __syncwarp();
    if (t % 32 == 0) out[round * 8 + warp] = atomicAdd(&count[group], 0) - 4 * round;
    hopper::named_barrier(1 + group, 128);
  }
}"""
    out = torch.zeros(3, 2, 4, dtype=torch.int32)
    args = {"grid": 1, "threads": 256, "shared_bytes": 64, "schedules": (schedule,)}
    emulate(device_source() + source, "body", [out, SHARED], **args)
    assert (out == torch.tensor([1, 2, 3, 4] if schedule == "first" else [4, 3, 2, 1])).all()


@pytest.mark.parametrize("schedule", ["late", "first", "last"])
def test_what_one_thread_says_all_of_a_barrier_hear(schedule: str) -> None:
    """In each of two groups another thread says so, in the rounds that are its own."""
    source = """
__device__ void body(int* out) {
  const int t = threadIdx.x, group = t / 128;
  for (int round = 0; round < 5; ++round) {
    const bool mine = t == 7 + 130 * group && round % 2 == group;
    out[256 * round + t] = hopper::named_barrier_any(1 + group, 128, mine);
  }
}"""
    out = torch.full((5, 2, 128), 7, dtype=torch.int32)
    args = {"grid": 1, "threads": 256, "shared_bytes": 64, "schedules": (schedule,)}
    emulate(device_source() + source, "body", [out], **args)
    assert (out == (torch.arange(5)[:, None, None] % 2 == torch.arange(2)[:, None])).all()


def test_misuse_is_named() -> None:
    divergent = "__device__ void body() { if (threadIdx.x < 16) __syncwarp(); }"
    with pytest.raises(EmulationError, match=r"deadlock(.|\n)*has ended(.|\n)*__syncwarp"):
        emulate(divergent, "body", [], grid=1, threads=32)
    spin = "__device__ void body(volatile int* x) { while (!*x) {} }"
    with pytest.raises(EmulationError, match="time limit"):
        emulate(spin, "body", [torch.zeros(1, dtype=torch.int32)], grid=1, threads=32, seconds=1)
    racy = "__device__ void body(int* x) { *x = threadIdx.x; }"
    with pytest.raises(EmulationError, match="depends on the schedule"):
        emulate(racy, "body", [torch.zeros(1, dtype=torch.int32)], grid=1, threads=32)
    unwritten = "__device__ void body(float* x, float* s) {\n  x[threadIdx.x] = s[threadIdx.x];\n}"
    with pytest.raises(EmulationError, match=r"never written(.|\n)*line 2: x\[threadIdx.x\] = s"):
        emulate(unwritten, "body", [torch.zeros(32), SHARED], grid=1, threads=32, shared_bytes=128)
