// C function of the scale search, for the instruction set of this CPU.
#include <cstring>

#include "scale_search/scale_search_loop.h"

using namespace infer_native;

extern "C" INFER_API void infer_fit(const float* weight, const float* table, const float* bounds, const float* importance,
                                    const float* inverses, int64_t rows, int64_t columns, int64_t tables,
                                    int64_t entries, int64_t group, uint8_t* codes, int8_t* scale,
                                    float* row_scale) {
  const FitTask task = {weight, table,   bounds, importance, inverses, rows,     columns,
                        tables, entries, group,  codes,      scale,    row_scale};
#if defined(__x86_64__)
  if (std::strcmp(vector_isa().name, "avx512_vnni") == 0) return fit_avx512(task);
  if (std::strcmp(vector_isa().name, "avx2") == 0) return fit_avx2(task);
#endif
  fit_any(task);
}
