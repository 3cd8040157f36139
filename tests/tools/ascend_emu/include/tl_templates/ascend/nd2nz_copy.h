// In place of TileLang's header of this name: rows in the order that L1 has, with a row of padding behind them.
#pragma once
#include "tl_templates/ascend/gemm.h"

template <int Rows, int Columns, class From, class To>
void ascend_nd2nz_scatter(From* from, To* to) {
  constexpr int kC0 = 32 / sizeof(To);
  const emu::Pipe on(PIPE_V);
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Columns; ++j) to[(j / kC0 * (Rows + 1) + i) * kC0 + j % kC0] = from[i * Columns + j];
}
