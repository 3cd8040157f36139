"""The only tolerances of the tests, each with the measurement that it comes from."""

# Next-token laws of the incremental and the dense model in float32 accumulation, random weights (2026-11-30,
# 60 tokens): a sum in another order flips a rounding, a flipped rounding an expert or an entry. Median KL
# divergence over three texts up to 0.0043 (tiny), 0 (micro); top-1 agreement 0.83 and above.
MODEL_KL_MEDIAN = 6e-3
MODEL_TOP1 = 0.8

# Sparse attention against the reference in float64, bf16 outputs (2026-11-30, emulator and H200): weights are
# rounded relative to a maximum so far, which later ones may exceed by a factor of 2^16. Worst of all cases:
# distance 3.1e-6, error over max(value, row rms) 0.038 (output rotated back; 0.024 else), log-sum-exp 4e-6.
ATTN_DISTANCE = 8e-6
ATTN_ERROR = 0.05
ATTN_LSE = 8e-6

# Experts against the reference, bf16 outputs, DeepGEMM's distance. On an H200 at full size (2026-11-30): bf16
# products 1.6e-8; FP8 products up to 9.1e-6, since the tensor cores keep about 14 bits within 32 products,
# which moves an inner activation by a code now and then.
DOT_BF16 = 1e-5

# The same where the first product's sums are exact: what is left is the second product's rounding to bf16.
# Worst of 40 seeds, 1 to 300 tokens of hidden 256, inter 128, on an H200 (2026-11-30): 5.8e-7.
DOT_EXACT_INNER = 1e-6
