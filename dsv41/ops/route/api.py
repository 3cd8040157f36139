"""Expert choice."""

import torch

from ..._op import Op, check, check_tensor, output

_ROUTE = Op(
    "topk_route(Tensor logits, Tensor bias, Tensor? image_bias, Tensor? image, float temperature, float scale,"
    " Tensor(a!) ids, Tensor(b!) weights) -> ()",
    reference="dsv41_reference.route:topk_route",
    package=__package__,
)


def topk_route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    scale: float,
    temperature: float = 1.0,
    image_bias: torch.Tensor | None = None,
    image: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by sqrt(softplus) plus a bias; weigh them without the bias.

        a = sqrt(softplus(logits / temperature))               softplus is linear above 20
        ids = the top_k largest of a + bias, largest first; equal values by the lower id
        weights = a[ids] / (sum a[ids] + 1e-20) * scale

    Args:
        logits: [num_tokens, num_experts] f32.
        bias: [num_experts] f32, for the choice only.
        top_k: experts a token.
        scale: sum of a row's weights.
        temperature: divides the logits.
        image_bias: [num_experts] f32, the bias of image tokens; needs ``image``.
        image: [num_tokens] bool, which tokens are image tokens.
        out: ids [num_tokens, top_k] int32 and weights [num_tokens, top_k] f32 to write into.

    Returns:
        ids [num_tokens, top_k] int32, distinct in a row, and weights [num_tokens, top_k] f32.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.route.topk_route
    """
    name = "topk_route"
    check_tensor(name, "logits", logits, (None, None), torch.float32)
    tokens, experts = logits.shape
    check_tensor(name, "bias", bias, (experts,), torch.float32, like=logits)
    check(1 <= top_k <= experts, name, f"top_k: 1 to {experts}", top_k)
    check((image is None) == (image_bias is None), name, "image and image_bias together", (image, image_bias))
    if image is not None and image_bias is not None:
        check_tensor(name, "image", image, (tokens,), torch.bool, like=logits)
        check_tensor(name, "image_bias", image_bias, (experts,), torch.float32, like=logits)
    given = out or (None, None)
    out = (
        output(name, given[0], (tokens, top_k), torch.int32, logits, "out ids"),
        output(name, given[1], (tokens, top_k), torch.float32, logits, "out weights"),
    )
    _ROUTE(logits, bias, image_bias, image, temperature, scale, *out)
    return out
