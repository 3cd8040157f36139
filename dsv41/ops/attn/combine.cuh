// Combination of parts: a block of 128 threads makes one head of one row. After sparse_attn.cuh.
namespace sparse_attn {
__device__ __forceinline__ void combine(Address scratch, int rows, int heads, int splits, Address sink,
                                        Address cos, long long cos_row, Address sin, long long sin_row, Address out,
                                        long long out_row, long long out_head, Address lse) {
  const int row = blockIdx.x / heads, head = blockIdx.x % heads;
  const float* partial = scratch.as<const float>();
  const float* sums = partial + static_cast<size_t>(rows) * splits * heads * WIDTH;
  const size_t part = static_cast<size_t>(row) * splits * heads + head;
  float top = -INFINITY;
  for (int s = 0; s < splits; ++s) top = fmaxf(top, sums[2 * (part + static_cast<size_t>(s) * heads)]);
  const float base = top == -INFINITY ? 0.f : top;
  float4 value = make_float4(0, 0, 0, 0);
  float sum = 0;
  for (int s = 0; s < splits; ++s) {
    const size_t at = part + static_cast<size_t>(s) * heads;
    const float weight = exp2f(sums[2 * at] - base);
    const float4 v = *reinterpret_cast<const float4*>(partial + at * WIDTH + threadIdx.x * 4);
    sum += weight * sums[2 * at + 1];
    value.x += weight * v.x, value.y += weight * v.y, value.z += weight * v.z, value.w += weight * v.w;
  }
  float total = sum;
  if (sink.at != nullptr) total += exp2f(sink.as<const float>()[head] * 1.44269504088896340736f - base);
  const float factor = total == 0 ? 0.f : 1 / total;
  uint2 packed;
  packed.x = pair(value.x * factor, value.y * factor), packed.y = pair(value.z * factor, value.w * factor);
  const int angle = (static_cast<int>(threadIdx.x) - 112) * 2;
  if (angle >= 0) {
    const Angles angles = {cos.as<const float>(), sin.as<const float>(), cos_row, sin_row};
    packed.x = rotated(value.x * factor, value.y * factor, angles, row, angle);
    packed.y = rotated(value.z * factor, value.w * factor, angles, row, angle + 1);
  }
  *reinterpret_cast<uint2*>(out.as<uint8_t>() + 2 * (row * out_row + head * out_head) + threadIdx.x * 8) = packed;
  if (lse.at != nullptr && threadIdx.x == 0)
    lse.as<float>()[static_cast<size_t>(row) * heads + head] = logf(sum) + base * 0.69314718055994530942f;
}

}  // namespace sparse_attn
