// Scale search with 16 floats in a register.
#define REGISTER_BYTES 64
#include "scale_search/scale_search_loop.h"

void infer_native::fit_avx512(const FitTask& task) { fit_any(task); }
