// Scale search with 8 floats in a register.
#define REGISTER_BYTES 32
#include "scale_search/scale_search_loop.h"

void infer_native::fit_avx2(const FitTask& task) { fit_any(task); }
