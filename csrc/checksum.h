// SPDX-License-Identifier: Apache-2.0
//
// The checksum of KV pages, and copies that compute it in the same pass over memory. It is defined
// in vllm_ascend_pd/backends/block_copy.py.

#ifndef VLLM_ASCEND_PD_CSRC_CHECKSUM_H_
#define VLLM_ASCEND_PD_CSRC_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace vllm_ascend_pd {

constexpr size_t kWordBytes = sizeof(uint64_t);

// Checksum of a byte string that comes in pieces of any length.
class Hasher {
 public:
  explicit Hasher(uint64_t seed);

  // Copies, and adds what was stored. With stream, around the caches where that is possible.
  void Copy(uint8_t* to, const uint8_t* from, size_t num_bytes, bool stream);
  void Update(const uint8_t* data, size_t num_bytes);
  uint64_t Finish();

 private:
  void AddWords(const uint8_t* data, size_t num_words);

  uint64_t sum_;
  uint64_t counter_;  // k of the next word
  uint64_t num_bytes_ = 0;
  uint8_t pending_[kWordBytes] = {};  // the start of a word that the next piece goes on with
  size_t num_pending_ = 0;
};

// Copies num_words words and returns what they add to the sum of a byte string in which first_word
// words precede them.
uint64_t CopyWords(uint8_t* to, const uint8_t* from, size_t num_words, uint64_t first_word);

uint64_t Checksum(const uint8_t* data, size_t num_bytes, uint64_t seed);

}  // namespace vllm_ascend_pd

#endif  // VLLM_ASCEND_PD_CSRC_CHECKSUM_H_
