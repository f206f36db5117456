// SPDX-License-Identifier: Apache-2.0
//
// Pages from one process to another through a small ring of memory that both map, packed and placed
// at the same time. The ring and its promises are drawn in vllm_ascend_pd/backends/page_ring.py.
//
// Nothing here checks bounds or knows Python: bindings.cpp does. What the other process writes into
// the ring is never an address or a length here: at worst the checksums differ.

#ifndef VLLM_ASCEND_PD_CSRC_PAGE_RING_H_
#define VLLM_ASCEND_PD_CSRC_PAGE_RING_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "block_copy.h"
#include "checksum.h"

namespace vllm_ascend_pd {

constexpr size_t kRingChunkBytes = size_t{256} << 10;
constexpr size_t kRingMaxChunks = 8;
constexpr size_t kRingHeaderBytes = 4096;

// At the start of the ring. A line for each that is written by one side only.
struct RingHeader {
  // Of the one transfer that the ring is for, written by the consumer; another value ends it.
  alignas(64) std::atomic<uint64_t> key;
  alignas(64) std::atomic<uint32_t> num_packed;  // chunks, by the producer
  std::atomic<uint32_t> packer_sleeps;
  std::atomic<int32_t> packer_cpu;  // where it runs, -1 before it does
  std::atomic<uint64_t> answer;     // the checksum, once the producer stands by it, else 0
  alignas(64) std::atomic<uint32_t> num_placed;  // chunks, by the consumer
  std::atomic<uint32_t> placer_sleeps;
};
static_assert(sizeof(RingHeader) <= kRingHeaderBytes, "the header has one page");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share no lock");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share no lock");

enum class PackStatus {
  kDone,     // all is packed
  kWaiting,  // for room, for longer than asked
  kEnded,    // the ring is not for this transfer any more
};

// A walk over pages, chunk by chunk, whatever their size. Keeps its own copy of the arrays.
class PageWalk {
 public:
  PageWalk(const PageList& pages, uint64_t seed);

  size_t num_bytes_left() const { return num_bytes_left_; }
  // Copies the next num_bytes, at most those left, to or from memory.
  void Gather(uint8_t* to, size_t num_bytes);
  void Scatter(const uint8_t* from, size_t num_bytes);
  // After the last byte.
  uint64_t Finish() { return hasher_.Finish(); }

 private:
  template <typename Copy>
  void Walk(size_t num_bytes, Copy copy);

  uint8_t* base_;
  std::vector<int64_t> layer_offsets_;
  std::vector<int64_t> block_strides_;
  std::vector<int64_t> block_ids_;
  size_t page_bytes_;
  size_t num_bytes_left_;
  size_t layer_ = 0;
  size_t block_ = 0;
  size_t in_page_ = 0;
  Hasher hasher_;
};

// The producer's end. One thread at a time.
class RingPacker {
 public:
  // ring: of ring_bytes, at least two chunks and the header.
  RingPacker(const PageList& pages, uint8_t* ring, size_t ring_bytes, uint64_t key);

  // Packs until all is packed, or there has been no room for patience_us.
  PackStatus Run(int64_t patience_us);
  // Tells the consumer the checksum: what was packed counts.
  void Confirm();
  size_t num_bytes_left() const { return walk_.num_bytes_left(); }
  // Of all pages, once done.
  uint64_t checksum() const { return checksum_; }

 private:
  RingHeader* header_;
  uint8_t* chunks_;
  uint32_t num_chunks_;
  uint64_t key_;
  PageWalk walk_;
  uint32_t num_packed_ = 0;
  uint64_t checksum_ = 0;
};

// The consumer's end. Makes the ring ready for its transfer. One thread at a time.
class RingPlacer {
 public:
  RingPlacer(const PageList& pages, uint8_t* ring, size_t ring_bytes, uint64_t key);

  // Until there is something to place or nothing is left; false after patience_us.
  bool Wait(int64_t patience_us) const;
  // Places what is there, and what comes within patience_us after it. True once all is placed.
  bool Run(int64_t patience_us);
  // Whether the producer confirms what was placed, once all is; waits for it as long as asked.
  bool IsConfirmed(int64_t patience_us) const;
  // From now on the producer writes at most the chunk that it is writing.
  void End();
  size_t num_bytes_left() const { return walk_.num_bytes_left(); }
  uint64_t checksum() const { return checksum_; }

 private:
  bool has_chunk() const;

  RingHeader* header_;
  const uint8_t* chunks_;
  uint32_t num_chunks_;
  uint64_t key_;
  PageWalk walk_;
  uint32_t num_placed_ = 0;
  uint64_t checksum_ = 0;
};

}  // namespace vllm_ascend_pd

#endif  // VLLM_ASCEND_PD_CSRC_PAGE_RING_H_
