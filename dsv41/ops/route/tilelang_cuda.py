"""Expert choice on Hopper (route.cuh): a warp a token."""

from pathlib import Path

import tilelang.language as T

from ..._op import compiled
from .._tilelang import arch_of, build, device_source

HERE = Path(__file__).parent
ARCH = "sm_90a"


def source():
    """The text of the kernel."""
    return device_source(HERE.parent / "quant" / "quantize.cuh", HERE / "route.cuh")


def route_call(experts, top_k, unit):
    """Device function; ``unit``: without a temperature."""
    return f"route::topk<{experts}, {top_k}, {str(unit).lower()}>"


@compiled
def _route(experts, top_k, unit, arch):
    text, call = source(), route_call(experts, top_k, unit)

    @T.prim_func
    def topk_rows(
        ids: T.Tensor((1,), T.int32),  # the start of the results
        logits: T.int64,
        stride: T.int64,
        bias: T.int64,
        image_bias: T.int64,
        image: T.int64,
        temperature: T.float32,
        scale: T.float32,
        ids_stride: T.int64,
        weights: T.int64,
        weights_stride: T.int64,
        count: T.int32,
    ):
        with T.Kernel(T.ceildiv(count, 4), threads=128) as _:
            T.import_source(text)
            T.pdl_sync()
            T.pdl_trigger()
            T.call_extern(
                "handle", call, logits, stride, bias, image_bias, image, temperature, scale,
                ids.access_ptr("w"), ids_stride, weights, weights_stride, count,
            )  # fmt: skip

    return build(topk_rows, arch)


def variants(cfg):
    """The model's experts and the drafter's."""
    for experts, top_k in ((cfg.num_experts, cfg.top_k), (cfg.draft.num_experts, cfg.draft.top_k)):
        yield _route, (experts, top_k, cfg.route_temperature == 1, ARCH)


def topk_route(logits, bias, image_bias, image, temperature, scale, ids, weights):
    """Launch of ``dsv41.ops.topk_route``."""
    count, experts = logits.shape
    if count:
        given = image is not None and image_bias is not None
        of_images = (image_bias.data_ptr(), image.data_ptr()) if given else (0, 0)
        _route(experts, ids.shape[1], temperature == 1, arch_of(logits))(
            ids.as_strided((1,), (1,)), logits.data_ptr(), logits.stride(0), bias.data_ptr(), *of_images,
            temperature, scale, ids.stride(0), weights.data_ptr(), weights.stride(0), count,
        )  # fmt: skip
