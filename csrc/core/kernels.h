// The seam between the instruction sets and everything else: one table of functions per instruction set,
// exported by csrc/isa/NAME.cpp, chosen once (isa/dispatch.h). Nothing below names a vector type.
//
// Letters: M rows of x, K columns of x and of a weight, N rows of a weight = columns of y.
// A "strip" is 16 consecutive rows of a weight; a strip of a packed matrix is one contiguous run of tiles.
#pragma once

#include <cstdint>

#include "runtime/rate.h"

namespace isthmus {

// One packed matrix W[rows, columns] in tiles [ceil(rows/16)][columns / block] (design 4.1).
struct MatrixView {
  int format;           // ggml type id, an entry of formats.def
  const uint8_t* data;  // first tile; only 1-byte alignment may be assumed
  int64_t rows;         // N
  int64_t columns;      // K
};

// What belongs to 64 codes of x, in the forms that the products read without converting them.
struct CodeBlock {
  float scale[2];            // of 32 codes each: x is about scale * code
  float of_16[4], of_32[2];  // sums of the codes; exact, below 2^24
  int16_t pairs[4];          // the sums of 16 once more; two side by side are one 32-bit lane
  int16_t minus_pairs[8];  // of each 16 codes: minus the sum of codes 4g, 4g + 1, minus that of 4g + 2, 4g +
                           // 3; filled where products are summed in 16 bits
};

// M rows of x, prepared for the products in one or more of three forms; a kernel reads one of them (Reads),
// the others may be null. Blocks of 64 columns; the last may be 32 and is zero-filled. `pitch` >= rows is the
// number of row places stored per block.
struct ActivationView {
  int rows;
  int pitch;
  int64_t columns;          // K
  const int8_t* codes;      // [ceil(K/64)][pitch][64]   x / scale, rounded to nearest even, |code| <= 127
  const CodeBlock* blocks;  // [ceil(K/64)][pitch]       of the same 64 codes
  const uint16_t* halves;  // [ceil(rows/16)][ceil(K/32)][16][32]   bf16, zero past column K; rows past `rows`
                           // exist and hold anything: they reach no result
  const float* values;     // [rows][stride]            x itself
  int64_t stride;          // floats between rows of `values`
};

constexpr int kHalvesColumns = 32, kHalvesTile = 16 * kHalvesColumns;

// Where columns 32 group .. + 31 of row `row` stand among `halves` of `columns` columns.
constexpr int64_t halves_place(int64_t columns, int64_t row, int64_t group) {
  const int64_t groups = (columns + kHalvesColumns - 1) / kHalvesColumns;
  return (row / 16 * groups + group) * kHalvesTile + row % 16 * kHalvesColumns;
}

// How a format is multiplied (core/format.h says which).
enum class Policy : int { Int8, Bf16, F32 };

// The form of x that a product reads: `codes` (with `blocks`), `halves` or `values`.
enum class Reads : int { Codes, Halves, Values };

struct MatmulKernels {
  // What gemm reads for an integer format, Codes or Halves. Which is a property of the instruction set: the
  // first wins where there are only vector products, the second with a matrix unit. BF16 weights: Halves;
  // fp32 and fp16: Values. gemv reads Codes for the integer formats and Values for the others.
  Reads int8_gemm;
  // Quantises one row of x: places row `row` of a view with the given pitch. codes and blocks as above.
  void (*quantize_row)(const float* x, int64_t columns, int row, int pitch, int8_t* codes, CodeBlock* blocks);
  // Rounds one row of x into `halves`, its place `row`.
  void (*round_row)(const float* x, int64_t columns, int row, uint16_t* halves);
  // y[m * y_stride + (n - 16 * strip_begin)] = sum_k x[m, k] w[n, k] for strips [strip_begin, strip_end),
  // fp32, n < w.rows. gemv shares one unpack among up to 8 rows and loops for more; gemm needs `scratch` of
  // kGemmScratchBytes (core/tuning.h), 64-byte aligned, private to the caller.
  void (*gemv)(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end, float* y,
               int64_t y_stride);
  void (*gemm)(const MatrixView& w, const ActivationView& x, int64_t strip_begin, int64_t strip_end, float* y,
               int64_t y_stride, void* scratch);
  // out[columns] = row `row` of w as fp32 (embedding rows, tests).
  void (*dequantize_row)(const MatrixView& w, int64_t row, float* out);
  // Once per thread before its first gemm (AMX tile configuration); may be a no-op.
  void (*enter_thread)();
};

// Activation functions of an FFN, a small value type passed once.
struct Act {
  enum Kind : int { Silu = 0, Gelu = 1 } kind = Silu;  // Gelu: tanh approximation
  float limit = 0;                                     // > 0: gate <= limit, |up| <= limit before the product
};

// What works on rows of fp32 x rather than on weights; rows/args.h defines the argument structs.
struct RmsNormArgs;
struct RopeWriteArgs;
struct LatentWriteArgs;
struct ReadRowsArgs;
struct AttentionArgs;
struct RouterArgs;

struct RowKernels {
  void (*rms_norm)(const RmsNormArgs& a, int64_t row_begin, int64_t row_end);
  // out[i] = act(gate[i]) * up[i]; out may be gate.
  void (*act_mul)(const Act& act, const float* gate, const float* up, int64_t n, float* out);
  // y[i] += w * x[i], one fma each.
  void (*axpy)(float w, const float* x, int64_t n, float* y);
  // The largest of x[n], n > 0, if all of them are finite, which is said.
  float (*highest)(const float* x, int64_t n, bool* finite);
  void (*rope_write)(const RopeWriteArgs& a, int64_t row_begin, int64_t row_end);
  void (*latent_write)(const LatentWriteArgs& a, int64_t row_begin, int64_t row_end);
  void (*read_rows)(const ReadRowsArgs& a, int64_t row_begin, int64_t row_end);
  // GQA, absorbed MLA and plain attention alike; merge joins what several items computed of one row.
  void (*attention)(const AttentionArgs& a, int64_t item_begin, int64_t item_end);
  // The same within a tolerance, by bf16 products, where both dims are multiples of the step; or null.
  int attention_bf16_step;
  void (*attention_bf16)(const AttentionArgs& a, int64_t item_begin, int64_t item_end);
  void (*attention_merge)(const AttentionArgs& a, int64_t item_begin, int64_t item_end);
  void (*router_topk)(const RouterArgs& a, int64_t row_begin, int64_t row_end);
};

// The rate of multiply-adds alone, per policy: what a GEMM's is measured against (drivers/limits.h).
constexpr int64_t kLimitScratchBytes = 64 * 1024;
struct LimitKernels {
  RateLoop int8, bf16;
};

struct KernelTable {
  const char* name;  // scalar, avx2, avx2vnni, avx512, amx
  MatmulKernels matmul;
  RowKernels rows;
  LimitKernels limits;
};

}  // namespace isthmus
