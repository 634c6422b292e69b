// Every number of the CPU core that was chosen rather than derived, in one place. None of them changes a
// result: the GEMV and the GEMM driver round differently, so kGemmMinRows alone decides which rounding a row
// gets.
#pragma once

#include <cstdint>

namespace isthmus::tuning {

// --- threads
// ---------------------------------------------------------------------------------------------------
inline constexpr int kMaxThreads = 1024;
// How long an idle worker watches for the next job before it sleeps on the futex: the glue between two native
// calls of a decode step takes 5 to 50 us, a futex wake 5 to 50 us.
inline constexpr int64_t kSpinUs = 100;
// A sched_yield that takes longer than this gave the core to somebody who needed it: stop spinning.
inline constexpr int64_t kYieldLostUs = 15;
// ... and do not spin again for so many waits.
inline constexpr int kWaitsWithoutSpin = 32;

// --- products
// -------------------------------------------------------------------------------------------------- Rows per
// expert from which the GEMM driver is used (exact: never).
inline constexpr int64_t kGemmMinRows = 9;
// Columns of the hidden activation per gate/up item: one quantisation block, so the item that computed a
// block can quantise it and no barrier is needed. Derived from ActivationView, not tunable.
inline constexpr int64_t kHiddenBlock = 64;
// Largest x (codes, or floats of a float policy) that one item multiplies: it is read again for every strip,
// so it has to stay in a core's L2 (1 MiB on the smallest machines we know, 2 MiB on Sapphire Rapids).
inline constexpr int64_t kActivationBytes = 512 << 10;
// Rows per group never fall under this (a GEMM panel is unpacked once per group).
inline constexpr int64_t kGroupMinRows = 64;
// Per-worker room for the partial outputs of the down projection in prefill ([pairs][columns] floats).
inline constexpr int64_t kPartialBytes = 768 << 10;
// A work item of a product reads about this many weight bytes (10 us at 10 GB/s), fewer when there are not
// kItemsPerThread items for every thread.
inline constexpr int64_t kItemBytes = 128 << 10;
inline constexpr int64_t kItemsPerThread = 4;
// Floats of x below which quantising is done by the caller alone: a barrier costs more.
inline constexpr int64_t kSerialQuantizeFloats = 32 << 10;

}  // namespace isthmus::tuning
