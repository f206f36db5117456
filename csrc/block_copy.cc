// SPDX-License-Identifier: Apache-2.0

#include "block_copy.h"

#include <algorithm>

#include "checksum.h"

namespace vllm_ascend_pd {
namespace {

// Copies of so many bytes or more go around the caches, which they would only empty.
constexpr size_t kMinStreamBytes = size_t{256} << 10;

// Calls visit(page, staging_offset) for every page in staging order.
template <typename Visit>
void ForEachPage(const PageList& pages, Visit visit) {
  size_t staging_offset = 0;
  for (size_t layer = 0; layer < pages.num_layers; ++layer) {
    uint8_t* const blocks = pages.base + pages.layer_offsets[layer];
    for (size_t i = 0; i < pages.num_blocks; ++i) {
      visit(blocks + pages.block_ids[i] * pages.block_strides[layer], staging_offset);
      staging_offset += pages.page_bytes;
    }
  }
}

}  // namespace

uint64_t Gather(const PageList& pages, uint8_t* staging, uint64_t seed) {
  Hasher hasher(seed);
  // Staging is read again at once, so it goes through the caches.
  ForEachPage(pages, [&](const uint8_t* page, size_t offset) {
    hasher.Copy(staging + offset, page, pages.page_bytes, false);
  });
  return hasher.Finish();
}

void GatherLayers(const PageList& pages, uint8_t* staging, size_t value_stride, uint64_t first_word,
                  uint64_t* sums) {
  const size_t num_words = pages.page_bytes / kWordBytes;
  std::fill_n(sums, pages.num_blocks, uint64_t{0});
  for (size_t layer = 0; layer < pages.num_layers; ++layer) {
    const uint8_t* const blocks = pages.base + pages.layer_offsets[layer];
    for (size_t i = 0; i < pages.num_blocks; ++i) {
      // Staging is read again soon, so it goes through the caches.
      sums[i] += CopyWords(staging + i * value_stride + layer * pages.page_bytes,
                           blocks + pages.block_ids[i] * pages.block_strides[layer], num_words,
                           first_word + layer * num_words);
    }
  }
}

uint64_t Scatter(const PageList& pages, const uint8_t* staging, uint64_t seed) {
  Hasher hasher(seed);
  const bool stream = pages.num_layers * pages.num_blocks * pages.page_bytes >= kMinStreamBytes;
  ForEachPage(pages, [&](uint8_t* page, size_t offset) {
    hasher.Copy(page, staging + offset, pages.page_bytes, stream);
  });
  return hasher.Finish();
}

}  // namespace vllm_ascend_pd
