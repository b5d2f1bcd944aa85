// Memory of one thread that grows and is kept.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace infer_native {

class ThreadBuffer {
 public:
  // Returns at least `bytes` bytes, 64-byte aligned; the contents of the last call may be lost.
  void* of(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      const int64_t wanted = (bytes + bytes / 2 + 4095) / 4096 * 4096;
      memory_.reset(std::aligned_alloc(64, static_cast<size_t>(wanted)));
      if (!memory_) throw std::bad_alloc();
      size_ = wanted;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t size_ = 0;
};

}  // namespace infer_native
