// The scale search with 16 floats to a register.
#define REGISTER_BYTES 64
#include "quantize_loop.h"

void infer_native::fit_avx512(const FitTask& task) { fit_any(task); }
