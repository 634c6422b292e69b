#include "moe/rows.h"

#include <algorithm>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "core/streams.h"
#include "runtime/round.h"
#include "runtime/tuning.h"

namespace isthmus {
namespace {

// The places of one block of 64 columns, writable: views are const for those who read them.
struct Block {
  int8_t* codes;
  CodeBlock* facts;

  Block(const ActivationView& x, int64_t block)
      : codes(const_cast<int8_t*>(x.codes) + block * x.pitch * kStepColumns),
        facts(const_cast<CodeBlock*>(x.blocks) + block * x.pitch) {}

  void copy(int to, const Block& from, int row) const {
    std::memcpy(codes + to * kStepColumns, from.codes + row * kStepColumns, kStepColumns);
    facts[to] = from.facts[row];
  }
};

// Whether a worker asks for all of the codes before its item.
bool are_few(const ActivationView& x) {
  return x.codes != nullptr && num_steps(x.columns) * x.pitch * kStepColumns <= tuning::kAskedBytes;
}

// Whole lines to memory, past the caches.
void copy_past_caches(const std::byte* from, uint8_t* to, int64_t bytes) {
#if defined(__SSE2__)
  const auto* source = reinterpret_cast<const __m128i*>(from);
  for (auto* at = reinterpret_cast<__m128i*>(to); at != reinterpret_cast<__m128i*>(to + bytes); at++) {
    _mm_stream_si128(at, _mm_load_si128(source++));
  }
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

uint16_t* halves_at(const ActivationView& x, int64_t row, int64_t group) {
  return const_cast<uint16_t*>(x.halves) + halves_place(x.columns, row, group);
}

}  // namespace

int64_t own_rows_bytes(RowFields fields, int rows, int64_t columns) {
  return activation_bytes(fields, rows, rows, columns) +
         (fields.values ? round_up(rows * columns * sizeof(float), 64) : 0);
}

ActivationView own_rows(RowFields fields, uint8_t* memory, int rows, int64_t columns) {
  const auto* values = reinterpret_cast<const float*>(memory + activation_bytes(fields, rows, rows, columns));
  return view_activations(fields, memory, rows, rows, columns, fields.values ? values : nullptr, columns);
}

ActivationView prepare_rows(ThreadPool& pool, const MatmulKernels& kernels, Buffer& memory, RowFields fields,
                            const float* x, int64_t rows, int64_t columns, int64_t stride) {
  const int count = static_cast<int>(rows);
  const int64_t bytes = activation_bytes(fields, count, count, columns);
  auto* start = memory.grow<uint8_t>(bytes);
  const ActivationView view = view_activations(fields, start, count, count, columns, x, stride);
  if (!fields.codes && !fields.halves) return view;
  const int64_t grain = std::max<int64_t>(1, tuning::kSerialFloats / columns);
  // The lines of a row are still in the caches of the others who read what stood there before, and are taken
  // from them one after the other: 4.4 us for 2048 columns where two cores are on two complexes of Zen 4, 1.2
  // where they are on one. Past the caches they cost neither of them that; whoever reads asks for all at
  // once.
  const bool past =
      reads_one_stream && pool.num_threads() > 1 && rows <= grain && are_few(view) && !fields.halves;
  pool.parallel(rows, grain, [&](int64_t begin, int64_t end, int worker) {
    if (!past) return fill_rows(kernels, view, static_cast<int>(begin), static_cast<int>(end));
    std::byte* own = pool.scratch(worker, bytes);
    fill_rows(kernels, view_activations(fields, own, count, count, columns, x, stride), 0, count);
    copy_past_caches(own, start, bytes);
  });
  return view;
}

ActivationView slice_rows(const ActivationView& x, int64_t begin, int rows) {
  ActivationView slice = x;
  slice.rows = rows;
  if (x.codes != nullptr) {
    slice.codes += begin * kStepColumns;
    slice.blocks += begin;
  }
  if (x.halves != nullptr) slice.halves = halves_at(x, begin, 0);
  if (x.values != nullptr) slice.values += begin * x.stride;
  return slice;
}

void ask_for(const ActivationView& x) {
  if (!are_few(x)) return;
  const int64_t places = num_steps(x.columns) * x.pitch;
  const auto ask = [](const void* data, int64_t bytes) {
    const auto* start = static_cast<const uint8_t*>(data);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(start + at);
  };
  ask(x.codes, places * kStepColumns);
  ask(x.blocks, places * static_cast<int64_t>(sizeof(CodeBlock)));
}

bool can_slice(RowFields fields, const int32_t* tokens, int rows) {
  for (int i = 1; i < rows; i++) {
    if (tokens[i] != tokens[0] + i) return false;
  }
  return !fields.halves || tokens[0] % 16 == 0;
}

void gather_rows(RowFields fields, const ActivationView& x, const int32_t* tokens, const ActivationView& to) {
  for (int64_t block = 0; fields.codes && block < num_steps(x.columns); block++) {
    const Block from(x, block), target(to, block);
    for (int i = 0; i < to.rows; i++) target.copy(i, from, tokens[i]);
  }
  for (int i = 0; fields.halves && i < to.rows; i++) {
    for (int64_t group = 0; group * kHalvesColumns < x.columns; group++) {
      std::memcpy(halves_at(to, i, group), halves_at(x, tokens[i], group), kHalvesColumns * sizeof(uint16_t));
    }
  }
  for (int i = 0; fields.values && i < to.rows; i++) {
    std::memcpy(const_cast<float*>(to.values) + i * to.stride, x.values + tokens[i] * x.stride,
                x.columns * sizeof(float));
  }
}

void store_block(const MatmulKernels& kernels, RowFields fields, const float* tile, int64_t block,
                 int64_t columns, const ActivationView& to) {
  const int64_t group = block * (kStepColumns / kHalvesColumns);
  for (int row = 0; row < to.rows; row++) {
    const float* from = tile + row * kStepColumns;
    if (fields.values) {
      std::memcpy(const_cast<float*>(to.values) + row * to.stride + block * kStepColumns, from,
                  columns * sizeof(float));
    }
    if (fields.halves) {
      for (int64_t c = 0; c < columns; c += kHalvesColumns) {
        kernels.round_row(from + c, std::min<int64_t>(columns - c, kHalvesColumns), 0,
                          halves_at(to, row, group + c / kHalvesColumns));
      }
    }
    if (fields.codes) {
      const Block target(to, block);
      kernels.quantize_row(from, columns, row, to.pitch, target.codes, target.facts);
    }
  }
}

int64_t rows_per_group(int64_t rows, int64_t row_bytes) {
  const int64_t fit = row_bytes == 0 ? tuning::kGroupMaxRows : tuning::kActivationBytes / row_bytes / 16 * 16;
  const int64_t most = std::clamp(fit, tuning::kGroupMinRows, tuning::kGroupMaxRows);
  const int64_t groups = (rows + most - 1) / most;
  return groups <= 1 ? rows : std::min(most, round_up((rows + groups - 1) / groups, 16));
}

}  // namespace isthmus
