// How work is cut and how long to wait: numbers that were chosen rather than derived. None of them changes a
// result (the one that does, kGemmMinRows, stands with the drivers in core/tuning.h).
#pragma once

#include <cstdint>

namespace isthmus::tuning {

// --- threads ----------------------------------------------------------------------------------------------
inline constexpr int kMaxThreads = 1024;
// Nodes that weights are split over; a machine with more is used as if it had one.
inline constexpr int kMaxNodes = 64;
// How long an idle worker watches for the next job before it sleeps on the futex: the glue between two native
// calls of a decode step takes 5 to 50 us, a futex wake 5 to 50 us.
inline constexpr int64_t kSpinUs = 100;
// A sched_yield that takes longer gave the core to somebody who needed it: stop spinning ...
inline constexpr int64_t kYieldLostUs = 15;
// ... and do not spin again for so many waits.
inline constexpr int kWaitsWithoutSpin = 4;

// --- hand-off ---------------------------------------------------------------------------------------------
// Time between submit and wait that is worth a coordinator: waking it takes 3 to 25 us, of which the caller
// pays 4 to 8, and being woken by it as long again. With less the caller computes itself what it waits for.
inline constexpr int64_t kBesideUs = 50;
// Unless it took longer the time before: then waking is nothing, and the time-out must be seen.
inline constexpr int64_t kInPlaceNs = 50'000'000;
// How long the coordinator polls without a break after a GPU's last submission: layers follow each other
// within a millisecond, steps within a few (chosen, not measured: this code has not run on a GPU yet).
inline constexpr int64_t kHotPollUs = 20'000;
// Then it naps for an eighth of the time that nothing has come, so that waking late adds at most an eighth.
inline constexpr int64_t kMinNapNs = 20'000, kMaxNapNs = 1'000'000;
// Looks at the words within one time-out. A look counts as one however long the process was stopped before
// it.
inline constexpr int kWatchdogLooks = 8;

// --- products ---------------------------------------------------------------------------------------------
// Largest x (codes, or floats of a float policy) that one item multiplies: it is read again for every strip,
// so it has to stay in a core's L2 (1 MiB on the smallest machines in question, 2 MiB on Sapphire Rapids).
inline constexpr int64_t kActivationBytes = 512 << 10;
// Groups of rows are not cut smaller than this for it: a GEMM panel is unpacked once per group.
inline constexpr int64_t kGroupMinRows = 64;
// Nor are they larger: an item keeps the outputs of all its rows.
inline constexpr int64_t kGroupMaxRows = 512;
// Per-worker room for the partial outputs of the down projection in prefill ([rows][columns] floats).
inline constexpr int64_t kPartialBytes = 1 << 20;
// A work item of a product reads about this many weight bytes (10 us at 10 GB/s), fewer when there are not
// kItemsPerThread items for every thread.
inline constexpr int64_t kItemBytes = 128 << 10;
inline constexpr int64_t kItemsPerThread = 4;
// Codes of x up to which a worker asks for all of them before its item: half of a first cache.
inline constexpr int64_t kAskedBytes = 16 << 10;
// Bytes of items that are read together, where nothing else is touched: between two of them a core waits for
// the dozen lines that say what comes next, which what it reads has pushed out of its caches, and meanwhile
// asks for none of it (Zen 4: 0.6 us, 20 KB; so does a jump from gate to up).
inline constexpr int64_t kStreamBytes = 4 << 20;
// The least of them: about what the end of a job costs one of its threads.
inline constexpr int64_t kStreamEndBytes = 32 << 10;
// Outputs of such items, if they go through a tile.
inline constexpr int64_t kStreamTileBytes = 16 << 10;
// Strips (16 output columns) of an item of a product: two are a panel of the GEMM driver.
inline constexpr int64_t kMaxStrips = 4;
inline constexpr int64_t kMinGemmStrips = 2;
// Floats of x below which the caller prepares them alone: a barrier costs more.
inline constexpr int64_t kSerialFloats = 32 << 10;

}  // namespace isthmus::tuning
