// Binds fused programs to torch (`infer::chain`). kernels/passes/fused_program/encode.py makes the programs.
#include <vector>

#include "fused_program/fused_program.h"
#include "torch_bindings/attend_check.h"
#include "unpadded_rows.h"

using namespace infer_native;

namespace {

// Header of a program: operand indices of the tokens, the selected rows and the inputs of attention, or -1; width of a token;
// number of operands that are not weights; page size and dtype of the cache; operand that marks real tokens, or -1; number of
// leading sizes of the tokens that count rows, 0 where the result has one size for them.
enum Header { TOKENS, WIDTH, PICKED, INPUTS, SLOTS, TABLE, STARTS, LENGTHS, PAGE, CACHE_DTYPE, PADDING, LEAD, HEADER };

template <class T>
const T* numbers_of(const View& view, int64_t count, int32_t dtype, const char* name) {
  STD_TORCH_CHECK(view.dtype == dtype && view.numel == count, "expected ", count, " numbers of ", name, ", got ", view.numel);
  return view.as<const T>();
}

// `read`: operand indices of slots, block table, starts and lengths.
AttendArgs attention_of(const View& cache, const std::vector<View>& inputs, const int64_t* header, const int64_t* read,
                        int64_t tokens) {
  AttendArgs args{};
  const View &table = inputs[read[1]], &lengths = inputs[read[3]];
  const int32_t ints = aoti_torch_dtype_int32();
  args.type = Number::FLOAT32, args.cache_type = static_cast<Number>(header[CACHE_DTYPE]), args.page = header[PAGE];
  args.tokens = tokens, args.sequences = lengths.numel;
  args.seq_lens = numbers_of<int32_t>(lengths, lengths.numel, ints, "seq_lens");
  args.query_start = numbers_of<int32_t>(inputs[read[2]], lengths.numel + 1, ints, "query_start");
  args.slot_mapping = numbers_of<int64_t>(inputs[read[0]], tokens, aoti_torch_dtype_int64(), "slot_mapping");
  STD_TORCH_CHECK(table.dim == 2 && table.sizes[0] == args.sequences, "expected block_table [", args.sequences, ", blocks]");
  args.blocks = table.sizes[1];
  args.block_table = numbers_of<int32_t>(table, table.numel, ints, "block_table");
  STD_TORCH_CHECK(cache.dtype == aoti_torch_dtype_uint8() && cache.dim == 3 && cache.contiguous(),
                  "expected kv_cache uint8 [layers, pages, page_bytes], dense");
  args.pages = cache.as<uint8_t>(), args.page_bytes = cache.sizes[2];
  return args;
}

// Raises unless every layer has a cache and every sequence its pages.
void check_attention(const ProgramCall& call, const View& cache, const std::vector<View>& inputs, const int64_t* header) {
  int64_t seen = -1, table = -1;  // window and block table checked last
  each_attention(call.program, [&](const AttendOp& op, const AttendOtherOp* other) {
    AttendArgs args = other == nullptr ? call.attention : attention_of(cache, inputs, header, &other->slots, call.rows[0]);
    if (const int64_t own = other == nullptr ? header[TABLE] : other->table; own != table) table = own, seen = -1;
    const int64_t size = args.cache_type == Number::FLOAT32 ? 4 : args.cache_type == Number::INT8 ? 1 : 2;
    const int64_t needed = 2 * op.kv_heads * args.page * (op.head_dim * size + (args.cache_type == Number::INT8 ? 4 : 0));
    STD_TORCH_CHECK(op.layer < cache.sizes[0] && needed <= args.page_bytes, "kv_cache has ", cache.sizes[0], " layers and pages of ",
                    args.page_bytes, " bytes, needed ", needed);
    args.window = op.window;
    if (args.window != seen) check_pages(args, cache.sizes[1]);
    seen = args.window;
  });
}

// Returns the row stride, in floats, of a tensor [..., width] that is a slice of columns of a wider one, else 0.
int64_t wider_stride(const View& view) {
  int64_t* strides;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(view.handle, &strides));
  const int64_t last = view.dim - 1;
  if (last < 1 || strides[last] != 1) return 0;
  for (int64_t i = 0; i + 1 < last; ++i)
    if (strides[i] != strides[i + 1] * view.sizes[i + 1]) return 0;
  return strides[last - 1];
}

// Returns the operand index of the mask of encoder attention, -1 without one.
int64_t mask_of(const int64_t* program) {
  for (const int64_t* op = program + 3 + 3 * program[2]; *op != END; op += op_length(*op))
    if (*op == ATTEND_ALL) return fields<AttendAllOp>(op).mask;
  return -1;
}

// Runs the program on the rows of real tokens; returns false where that does not pay, or where attention does not cover exactly
// all real tokens. Operands and strides are passed by value.
bool run_packed(ProgramCall call, const std::vector<View>& inputs, const int64_t* header, std::vector<void*> operands,
                std::vector<int64_t> strides) {
  const View& real = inputs[header[PADDING]];
  if (call.rows[0] == 0 || real.numel != call.rows[0] || real.dtype != aoti_torch_dtype_int64() || !real.contiguous()) return false;
  const int64_t batches = call.rows[0] / call.tokens, width = header[HEADER + 1], masked = mask_of(call.program);
  const PackedRows packed(real.as<int64_t>(), batches, call.tokens);
  if (!packed.pays() || masked < 0) return false;
  const View& mask = inputs[masked];
  const int64_t mask_rows = mask.numel / call.rows[0];
  if (mask.dtype != aoti_torch_dtype_bool() || !mask.contiguous() || mask.numel != call.rows[0] * mask_rows) return false;
  if ((mask_rows != 1 && mask_rows != call.tokens) || !packed.agrees(mask.as<bool>(), mask_rows)) return false;
  int64_t columns = width;
  for (int64_t i = 0; i < header[INPUTS]; ++i)
    if (i != header[PADDING] && i != masked) columns += inputs[i].numel / call.rows[0];
  thread_local std::vector<float> memory;
  memory.resize(static_cast<size_t>(packed.rows() * columns));
  float* at = memory.data() + packed.rows() * width;
  for (int64_t i = 0; i < header[INPUTS]; ++i) {
    if (i == header[PADDING] || i == masked) continue;
    const int64_t own = inputs[i].numel / call.rows[0];
    packed.pack(inputs[i].as<float>(), strides[i] > 0 ? strides[i] : own, own, at);
    operands[i] = at, strides[i] = 0;
    at += packed.rows() * own;
  }
  float* const result = call.result;
  call.operands = operands.data(), call.strides = strides.data(), call.result = memory.data();
  call.rows[0] = packed.rows(), call.tokens = packed.longest(), call.starts = packed.starts(), call.sequences = batches;
  run_program(call);
  packed.unpack(memory.data(), width, result);
  return true;
}

AtenTensorHandle chain(const AtenTensorHandle* operands, int64_t count, const int64_t* program, const double* numbers,
                       AtenTensorHandle cache) {
  thread_local std::vector<void*> pointers;
  thread_local std::vector<int64_t> strides;
  pointers.resize(count), strides.assign(count, 0);
  for (int64_t i = 0; i < count; ++i) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(operands[i], &pointers[i]));
  std::vector<std::optional<Tensor>> holders(program[INPUTS]);
  std::vector<View> inputs;
  for (int64_t i = 0; i < program[INPUTS]; ++i) {
    const View given(operands[i]);
    if (program[LEAD] > 0 && !given.contiguous()) strides[i] = wider_stride(given);
    inputs.push_back(strides[i] > 0 ? given : given.dense(holders[i]));
    pointers[i] = inputs[i].data;
  }
  int64_t rows[2] = {inputs[program[TOKENS]].numel / program[WIDTH], 0};
  if (program[PICKED] >= 0) {
    const View& picked = inputs[program[PICKED]];
    rows[1] = picked.numel;
    for (int64_t i = 0; i < rows[1]; ++i) {
      const int64_t row = picked.as<int64_t>()[i];
      STD_TORCH_CHECK(row >= 0 && row < rows[0], "row ", row, " of ", rows[0]);
    }
  }
  std::vector<int64_t> sizes(inputs[program[TOKENS]].sizes, inputs[program[TOKENS]].sizes + program[LEAD]);
  if (sizes.empty()) sizes.push_back(rows[program[HEADER]]);
  sizes.push_back(program[HEADER + 1]);
  const AtenTensorHandle result = new_floats(sizes.data(), static_cast<int64_t>(sizes.size()));
  ProgramCall call{program + HEADER, numbers, pointers.data(), strides.data(), {rows[0], rows[1]}, View(result).as<float>()};
  if (program[LEAD] > 0) call.tokens = sizes[program[LEAD] - 1];
  std::vector<int64_t> numel;
  if (cache != nullptr && rows[0] > 0) {
    const View pages(cache);
    for (const View& input : inputs) numel.push_back(input.numel);
    call.numel = numel.data();
    call.attention = attention_of(pages, inputs, program, program + SLOTS, rows[0]);
    call.layer_bytes = pages.sizes[1] * pages.sizes[2];
    check_attention(call, pages, inputs, program);
  }
  if (program[PADDING] >= 0 && run_packed(call, inputs, program, pointers, strides)) return result;
  run_program(call);
  return result;
}

Tensor on_tensors(const std::vector<Tensor>& operands, const std::vector<int64_t>& program,
                  const std::vector<double>& numbers, AtenTensorHandle cache) {
  std::vector<AtenTensorHandle> handles;
  for (const Tensor& operand : operands) handles.push_back(operand.get());
  return Tensor(chain(handles.data(), static_cast<int64_t>(handles.size()), program.data(), numbers.data(), cache));
}

Tensor op_chain(std::vector<Tensor> operands, std::vector<int64_t> program, std::vector<double> numbers) {
  return on_tensors(operands, program, numbers, nullptr);
}

Tensor op_chain_attend(Tensor kv_cache, std::vector<Tensor> operands, std::vector<int64_t> program,
                       std::vector<double> numbers) {
  return on_tensors(operands, program, numbers, kv_cache.get());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(infer, CPU, m) {
  m.impl("chain", TORCH_BOX(&op_chain));
  m.impl("chain_attend", TORCH_BOX(&op_chain_attend));
}

INFER_SHIM aoti_torch_cpu_chain(const AtenTensorHandle* operands, int64_t operands_size, const int64_t* program, int64_t,
                                const double* numbers, int64_t, AtenTensorHandle* ret0) {
  return guarded("chain", [&] { *ret0 = chain(operands, operands_size, program, numbers, nullptr); });
}

INFER_SHIM aoti_torch_cpu_chain_attend(AtenTensorHandle kv_cache, const AtenTensorHandle* operands, int64_t operands_size,
                                       const int64_t* program, int64_t, const double* numbers, int64_t,
                                       AtenTensorHandle* ret0) {
  return guarded("chain_attend", [&] { *ret0 = chain(operands, operands_size, program, numbers, kv_cache); });
}
