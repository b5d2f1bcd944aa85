// What one instruction set defines. A library compiled at first use holds the best one of its machine, a wheel's all of its
// architecture; the address of what is left out is null.
#pragma once

#define INFER_OF_SET extern __attribute__((weak))
