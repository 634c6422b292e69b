// What the row kernels are told. Strides and sizes are counted in elements, not bytes.
//
// Letters: T rows of x (tokens); a "slot" is block * kBlockTokens + offset, a place in a paged cache.
#pragma once

#include <cstdint>

namespace isthmus {

constexpr int kBlockTokens = 64;  // tokens in a block of every paged cache; also the keys of one softmax step

constexpr int kMaxRopeDims = 512;
constexpr int kMaxLatentWidth = 2048;  // latent + rope.dims

enum class CacheType : int { Bf16 = 0, F32 = 1, Q8_0 = 2 };

constexpr int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

// A plane is the kBlockTokens rows of one block and kv head. Of Q8_0 it is, in bytes,
//
//   [kBlockTokens][width]   int8 codes
//   [groups][kBlockTokens]  fp16 scales; groups of kScaleColumns columns, the last may be shorter
//
// value = code * scale, exact in fp32: ggml's Q8_0, with scales of their own place, so that those of 16 keys
// are one load. Reading 63 bytes past the codes of a row stays within the plane.
constexpr int kScaleColumns = 32;
constexpr int64_t scale_groups(int64_t width) { return (width + kScaleColumns - 1) / kScaleColumns; }
static_assert(2 * kBlockTokens * scale_groups(1) >= 63);

// Elements of a plane: bytes of Q8_0, values of the other types.
constexpr int64_t plane_size(CacheType type, int64_t width) {
  return kBlockTokens * (type == CacheType::Q8_0 ? width + 2 * scale_groups(width) : width);
}

struct RmsNormArgs {
  const float* x;
  int64_t x_stride;
  const float* weight;  // [columns], null for ones
  float eps;
  int64_t columns;
  float* out;  // may be x
  int64_t out_stride;
};

// Neox turns pairs (i, i + dims / 2), Norm pairs (2 i, 2 i + 1); ggml's names.
enum class RopeStyle : int { Neox = 0, Norm = 1 };

// cos and sin: [positions][dims / 2], so YaRN and every other scaling is data.
struct RopeTable {
  const float* cos;
  const float* sin;
  int dims;  // even; dimensions of a head past it are left alone
  RopeStyle style;
};

// q, k, v of one row stand side by side: q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim.
struct RopeWriteArgs {
  float* qkv;  // q is normalised and rotated in place; k and v go to the cache, their place here is scratch
  int64_t stride;
  int q_heads, kv_heads, head_dim;
  const float* q_norm;  // [head_dim] RMS norm of every head before the rotation, or null
  const float* k_norm;
  float eps;
  RopeTable rope;
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T]
  void* k_cache;             // [blocks][kv_heads] planes of head_dim
  void* v_cache;
  CacheType cache;
};

// The same for MLA: q's rope part is rotated, kv's latent part is normalised, its rope part rotated, and both
// written as one row of the latent cache.
struct LatentWriteArgs {
  const float* q;  // rope part of head 0 of row 0
  int64_t q_row_stride, q_head_stride;
  float* q_out;  // where the rotated part goes; may be q
  int64_t q_out_row_stride, q_out_head_stride;
  int heads;
  const float* kv;  // [T][latent + rope.dims]
  int64_t kv_stride;
  int latent;
  const float* kv_norm;  // [latent]
  float eps;
  RopeTable rope;
  const int32_t* positions;
  const int32_t* slots;
  void* cache;  // [blocks] planes of latent + rope.dims
  CacheType type;
};

// Copies rows of a cache of one head out as fp32: out[i][width] = row slots[i].
struct ReadRowsArgs {
  const void* cache;
  CacheType type;
  int64_t width;
  const int32_t* slots;
  float* out;
  int64_t out_stride;
};

// Keys and values in blocks of kBlockTokens tokens; of Q8_0 in planes, whose elements are bytes. v may lie
// inside k: the latent of MLA is both.
struct KeyValueView {
  const void* k;
  const void* v;
  CacheType type;
  int64_t k_block_stride, k_head_stride, k_token_stride;
  int64_t v_block_stride, v_head_stride, v_token_stride;
};

// A piece of work: `rows` consecutive rows of one sequence at consecutive positions, `heads` query heads that
// share one kv head, and a range of splits (attention.h) of the keys.
struct AttentionItem {
  int32_t row, rows;
  int32_t kv_head, head, heads;  // head: the first one, counted over all query heads
  int32_t split_begin, split_end;
  int64_t partial;  // floats into `partials` where the unfinished state goes; -1: finish, write `out`
};

struct AttentionArgs {
  const float* q;
  int64_t q_row_stride, q_head_stride;
  int heads, kv_heads;
  int qk_dim, v_dim;  // equal in GQA; 576 and 512 in absorbed MLA
  float scale;
  int window;          // a row sees its last `window` keys, itself included; 0: all
  const float* sinks;  // [heads] a logit that takes weight and gives no value, or null
  bool exact;          // the fp32 driver, whatever the machine has
  KeyValueView kv;
  const int32_t* block_tables;  // [sequences][max_blocks]; null: block i is i
  int64_t max_blocks;
  const int32_t* sequences;  // [T]
  const int32_t* positions;  // [T] row t sees keys 0 .. positions[t]
  float* out;
  int64_t out_row_stride, out_head_stride;
  // Keys may come in segments of whole splits, each call continuing from the states that the call before
  // left.
  int64_t first_block = 0;      // kv and the table begin here; a multiple of kSplitTokens / kBlockTokens
  int64_t end_key = INT64_MAX;  // keys from here on come in a later call
  float* carried = nullptr;     // [T][heads][attention_state_floats(v_dim)] states between calls
  bool carry_in = false, carry_out = false;
  // Set by attention/attention.cpp.
  const AttentionItem *items, *items_end;
  float* partials;  // [rows of the item][v_dim rounded up to 16 + 16] for every item that is not finished
  float* scratch = nullptr;  // attention_scratch_floats(), of bf16 products attention_bf16_scratch_floats()
};

// Query rows (rows x heads) one item may have. A block of keys is widened and transposed once per item: with
// 64 rows that costs 8 % of the products, with 32 rows of MLA's 576 dimensions 10 %; more rows would leave
// the L2.
constexpr int attention_tile_rows(int qk_dim, int v_dim) { return qk_dim + v_dim <= 512 ? 64 : 32; }

// Keys of one split: the softmax state of every 512 keys is built on its own and merged in order, whoever
// computes it, so that a decode of one row over a long context can use all threads.
constexpr int kSplitTokens = 512;

constexpr int64_t attention_state_floats(int v_dim) {
  return padded_dim(v_dim) + 16;
}  // O, then maximum and sum

// Queries that share the lanes of a vector, and how many such tiles an item has at most.
constexpr int kAttentionLanes = 8;
constexpr int kAttentionMaxTiles = 64 / kAttentionLanes;

// Memory of the driver on vectors beside that of the task: scores, maxima and sums of the queries, 64 columns
// of the values, the queries once more, 8 keys.
constexpr int64_t attention_driver_floats(int qk_dim, int v_dim) {
  const int64_t rows = attention_tile_rows(qk_dim, v_dim);
  return rows * (kBlockTokens + 4) + kBlockTokens * 64 + (rows + kAttentionLanes) * padded_dim(qk_dim);
}

constexpr int64_t attention_scratch_floats(int qk_dim, int v_dim) {
  const int64_t rows = attention_tile_rows(qk_dim, v_dim);
  return 2 * rows * attention_state_floats(v_dim) +
         kBlockTokens * scale_groups(qk_dim > v_dim ? qk_dim : v_dim) +
         attention_driver_floats(qk_dim, v_dim);
}

// Memory of a driver with bf16 products stands after that of the fp32 driver, which may have to take over: on
// matrix tiles (attention_amx.h), or on vectors.
constexpr int64_t attention_bf16_scratch_floats(int qk_dim, int v_dim) {
  const int64_t rows = attention_tile_rows(qk_dim, v_dim);
  const int64_t bf16_values = rows * (qk_dim + kSplitTokens) + int64_t{kSplitTokens} * v_dim + 32 * qk_dim;
  const int64_t tiles = rows * kSplitTokens + bf16_values / 2;
  const int64_t vectors = attention_driver_floats(qk_dim, v_dim);
  return attention_scratch_floats(qk_dim, v_dim) + (tiles > vectors ? tiles : vectors);
}

struct RouterArgs {
  enum Scoring : int {
    Softmax = 0,
    Sigmoid = 1,
    SoftmaxChosen = 2
  };  // SoftmaxChosen: over the k chosen only
  enum GroupScore : int { Maximum = 0, TopTwoSum = 1 };  // V2 group_limited_greedy, V3 noaux_tc
  const float* logits;                                   // [T][experts]
  int64_t stride;
  int experts, k;  // k <= experts of the chosen groups
  Scoring scoring;
  const float* bias;  // [experts] added for choosing, not to the weights; or null
  int groups, groups_kept;
  GroupScore group_score;
  bool normalise;  // weights / (sum + 1e-20)
  float scale;
  int32_t* ids;    // [T][k], best first; equal scores: the lower id first
  float* weights;  // [T][k]
};

constexpr int kMaxExperts = 1024;
constexpr int kMaxChosen = 64;

}  // namespace isthmus
