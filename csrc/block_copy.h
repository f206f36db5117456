// SPDX-License-Identifier: Apache-2.0
//
// Copies between scattered KV pages and one contiguous staging buffer, with a checksum of exactly
// the bytes that were stored. The layout is defined in vllm_ascend_pd/backends/block_copy.py, whose
// Python copier must agree bit for bit.
//
// Nothing here checks bounds, takes a lock or knows Python: bindings.cpp does.

#ifndef VLLM_ASCEND_PD_CSRC_BLOCK_COPY_H_
#define VLLM_ASCEND_PD_CSRC_BLOCK_COPY_H_

#include <cstddef>
#include <cstdint>

namespace vllm_ascend_pd {

// The pages base + layer_offsets[l] + block_ids[b] * block_strides[l], layer-major, then by b.
// Borrows the arrays.
struct PageList {
  uint8_t* base;
  const int64_t* layer_offsets;
  const int64_t* block_strides;  // as many
  size_t num_layers;
  const int64_t* block_ids;
  size_t num_blocks;
  size_t page_bytes;
};

// Copies the pages to staging, one after the other, and returns their checksum.
uint64_t Gather(const PageList& pages, uint8_t* staging, uint64_t seed);

// Copies page_bytes of each (layer, block), a multiple of 8, to
//   staging + b * value_stride + l * page_bytes
// and puts into sums[b] what these layers of block b add to the checksum of a byte string in which
// first_word words precede them there.
void GatherLayers(const PageList& pages, uint8_t* staging, size_t value_stride, uint64_t first_word,
                  uint64_t* sums);

// Copies staging to the pages and returns the checksum of what the pages hold afterwards. A write
// that hits staging meanwhile cannot slip in between copy and check.
uint64_t Scatter(const PageList& pages, const uint8_t* staging, uint64_t seed);

}  // namespace vllm_ascend_pd

#endif  // VLLM_ASCEND_PD_CSRC_BLOCK_COPY_H_
