// View of a borrowed torch tensor, for operators and for the C functions that compiled graphs call.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>

#define INFER_SHIM extern "C" __attribute__((visibility("default"))) AOTITorchError

namespace infer_native {

using torch::stable::Tensor;

struct View {
  AtenTensorHandle handle;
  void* data;
  int64_t dim, numel;
  const int64_t* sizes;
  int32_t dtype;

  explicit View(AtenTensorHandle tensor) : handle(tensor) {
    int64_t* borrowed;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(tensor, &numel));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &borrowed));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    sizes = borrowed;
  }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }

  bool contiguous() const {
    bool answer;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle, &answer));
    return answer;
  }

  // Returns the tensor in row-major order; `holder` owns a copy where one was needed.
  View dense(std::optional<Tensor>& holder) const {
    if (contiguous()) return *this;
    AtenTensorHandle shared;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &shared));
    holder = torch::stable::contiguous(Tensor(shared));
    return View(holder->get());
  }
};

// Allocates a float32 CPU tensor, row-major.
inline AtenTensorHandle new_floats(const int64_t* sizes, int64_t dim) {
  STD_TORCH_CHECK(dim <= 16, "expected at most 16 dimensions, got ", dim);
  int64_t strides[16], stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dim, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &made));
  return made;
}

// Optional operand that compiled graphs pass by pointer.
inline std::optional<View> optional_view(AtenTensorHandle* tensor) {
  return tensor == nullptr ? std::nullopt : std::optional<View>(View(*tensor));
}

inline std::optional<View> optional_view(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<View>(View(tensor->get())) : std::nullopt;
}

// Returns the data of an optional float32 operand, or null.
inline const float* floats(const std::optional<View>& view, int64_t count, const char* name) {
  if (!view) return nullptr;
  STD_TORCH_CHECK(view->dtype == aoti_torch_dtype_float32() && view->numel == count && view->contiguous(),
                  "expected ", name, " float32 [", count, "], got ", view->numel, " numbers");
  return view->as<const float>();
}

// Runs the body of a C function; on an exception prints its message to stderr and returns an error code.
template <typename Body>
AOTITorchError guarded(const char* name, Body body) {
  try {
    body();
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "infer::%s: %s\n", name, error.what());
    return AOTI_TORCH_FAILURE;
  }
}

}  // namespace infer_native
