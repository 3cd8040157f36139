// In place of TileLang's header of this name, which includes CANN; its own reductions and E4M3 type are used.
#pragma once
#include "simt_api/asc_fp8.h"
#include "tl_templates/ascend/ascend_fp8.h"
#include "tl_templates/ascend/numeric_limits.h"
#include "tl_templates/ascend/reduce.h"

using asc_load_l2_cache_mode = int;
using asc_store_l2_cache_mode = int;
inline void asc_init() {}
inline int asc_get_sub_block_id() { return 0; }
#define ASC_IS_AIC (emu::unit() == 0)
#define ASC_IS_AIV (emu::unit() == 1)
// Bursts of `bytes`; the strides of both sides in bytes.
inline void asc_copy_gm2ub_align(uint8_t* to, uint8_t* from, int bursts, int bytes, int, int, int, asc_load_l2_cache_mode, int64_t from_stride, int64_t to_stride) {
  emu::copy(PIPE_MTE2, to, from, bursts, bytes, to_stride, from_stride);
}
inline void asc_copy_ub2gm_align(uint8_t* to, uint8_t* from, int bursts, int bytes, asc_store_l2_cache_mode, int64_t to_stride, int64_t from_stride) {
  emu::copy(PIPE_MTE3, to, from, bursts, bytes, to_stride, from_stride);
}
