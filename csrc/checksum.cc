// SPDX-License-Identifier: Apache-2.0

#include "checksum.h"

#include <algorithm>
#include <cstring>

// One binary for every x86-64: the loader picks the version of the hot loop (function
// multiversioning needs ifunc, hence GNU/Linux). Elsewhere the compiler vectorises the portable
// one; on AArch64 NEON is the baseline.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__)
#define PD_HAS_AVX2_VERSION 1
#include <immintrin.h>
#endif

namespace vllm_ascend_pd {
namespace {

#if defined(__BYTE_ORDER__)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the checksum reads words as they lie");
#endif

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
// A piece is copied, then checksummed while it is still in the first-level cache.
constexpr size_t kPieceBytes = 8192;

uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

inline uint64_t LoadWord(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, kWordBytes);
  return word;
}

// What word i of a run adds to the sum; counter is its k.
inline uint64_t Term(uint64_t word, uint64_t counter) {
  const uint64_t mixed = word ^ counter;
  return (mixed & 0xFFFFFFFFULL) * (mixed >> 32) + ((word << 32) | (word >> 32));
}

// Sum of the terms of num_words words; first_counter is k of the first one.
#ifdef PD_HAS_AVX2_VERSION
__attribute__((target("default")))
#endif
uint64_t Accumulate(const uint8_t* data, size_t num_words, uint64_t first_counter) {
  uint64_t sum = 0;
  for (size_t i = 0; i < num_words; ++i) {
    sum += Term(LoadWord(data + i * kWordBytes), first_counter + i * kGolden);
  }
  return sum;
}

#ifdef PD_HAS_AVX2_VERSION
// The same, four words at a time. Compilers do not find the 32 x 32 -> 64 bit product by
// themselves.
__attribute__((target("avx2"))) uint64_t Accumulate(const uint8_t* data, size_t num_words,
                                                    uint64_t first_counter) {
  constexpr size_t kLanes = 4;
  const __m256i step = _mm256_set1_epi64x(static_cast<int64_t>(kLanes * kGolden));
  __m256i counters = _mm256_set_epi64x(static_cast<int64_t>(first_counter + 3 * kGolden),
                                       static_cast<int64_t>(first_counter + 2 * kGolden),
                                       static_cast<int64_t>(first_counter + kGolden),
                                       static_cast<int64_t>(first_counter));
  __m256i products = _mm256_setzero_si256();
  __m256i rotated = _mm256_setzero_si256();
  size_t i = 0;
  for (; i + kLanes <= num_words; i += kLanes) {
    const __m256i words =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i * kWordBytes));
    const __m256i mixed = _mm256_xor_si256(words, counters);
    const __m256i high_halves = _mm256_srli_epi64(mixed, 32);
    products = _mm256_add_epi64(products, _mm256_mul_epu32(mixed, high_halves));
    rotated = _mm256_add_epi64(rotated, _mm256_shuffle_epi32(words, _MM_SHUFFLE(2, 3, 0, 1)));
    counters = _mm256_add_epi64(counters, step);
  }
  uint64_t sums[kLanes];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), _mm256_add_epi64(products, rotated));
  uint64_t sum = sums[0] + sums[1] + sums[2] + sums[3];
  for (; i < num_words; ++i) {
    sum += Term(LoadWord(data + i * kWordBytes), first_counter + i * kGolden);
  }
  return sum;
}
#endif

// Copies num_words words and sums the terms of what was stored, so a late write to the source
// cannot slip in between copy and check. Only the AVX2 version knows how to go around the caches.
#ifdef PD_HAS_AVX2_VERSION
__attribute__((target("default")))
#endif
uint64_t CopyAndAccumulate(uint8_t* to, const uint8_t* from, size_t num_words,
                           uint64_t first_counter, bool /*stream*/) {
  uint64_t sum = 0;
  for (size_t done = 0; done < num_words;) {
    const size_t piece = std::min(kPieceBytes / kWordBytes, num_words - done);
    std::memcpy(to + done * kWordBytes, from + done * kWordBytes, piece * kWordBytes);
    sum += Accumulate(to + done * kWordBytes, piece, first_counter + done * kGolden);
    done += piece;
  }
  return sum;
}

#ifdef PD_HAS_AVX2_VERSION
// One pass: each vector is loaded once, stored and summed. Two cache-line halves at a time.
__attribute__((target("avx2"))) uint64_t CopyAndAccumulate(uint8_t* to, const uint8_t* from,
                                                           size_t num_words, uint64_t first_counter,
                                                           bool stream) {
  constexpr size_t kVectors = 2;
  constexpr size_t kLanes = 4;
  constexpr size_t kAheadBytes = 1024;
  const __m256i step = _mm256_set1_epi64x(static_cast<int64_t>(kVectors * kLanes * kGolden));
  __m256i counters[kVectors];
  __m256i products[kVectors];
  __m256i rotated[kVectors];
  for (size_t v = 0; v < kVectors; ++v) {
    const uint64_t first = first_counter + v * kLanes * kGolden;
    counters[v] = _mm256_set_epi64x(
        static_cast<int64_t>(first + 3 * kGolden), static_cast<int64_t>(first + 2 * kGolden),
        static_cast<int64_t>(first + kGolden), static_cast<int64_t>(first));
    products[v] = rotated[v] = _mm256_setzero_si256();
  }
  stream = stream && reinterpret_cast<uintptr_t>(to) % sizeof(__m256i) == 0;
  size_t i = 0;
  for (; i + kVectors * kLanes <= num_words; i += kVectors * kLanes) {
    const uint8_t* source = from + i * kWordBytes;
    _mm_prefetch(reinterpret_cast<const char*>(source + kAheadBytes), _MM_HINT_T0);
    for (size_t v = 0; v < kVectors; ++v) {
      const __m256i words =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + v * sizeof(__m256i)));
      __m256i* target = reinterpret_cast<__m256i*>(to + i * kWordBytes + v * sizeof(__m256i));
      if (stream) {
        _mm256_stream_si256(target, words);
      } else {
        _mm256_storeu_si256(target, words);
      }
      const __m256i mixed = _mm256_xor_si256(words, counters[v]);
      products[v] =
          _mm256_add_epi64(products[v], _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32)));
      rotated[v] =
          _mm256_add_epi64(rotated[v], _mm256_shuffle_epi32(words, _MM_SHUFFLE(2, 3, 0, 1)));
      counters[v] = _mm256_add_epi64(counters[v], step);
    }
  }
  if (stream) _mm_sfence();
  uint64_t sum = 0;
  for (size_t v = 0; v < kVectors; ++v) {
    uint64_t sums[kLanes];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums),
                        _mm256_add_epi64(products[v], rotated[v]));
    sum += sums[0] + sums[1] + sums[2] + sums[3];
  }
  for (; i < num_words; ++i) {
    const uint64_t word = LoadWord(from + i * kWordBytes);
    std::memcpy(to + i * kWordBytes, &word, kWordBytes);
    sum += Term(word, first_counter + i * kGolden);
  }
  return sum;
}
#endif

}  // namespace

uint64_t CopyWords(uint8_t* to, const uint8_t* from, size_t num_words, uint64_t first_word) {
  return CopyAndAccumulate(to, from, num_words, (first_word + 1) * kGolden, false);
}

Hasher::Hasher(uint64_t seed) : sum_(Mix(seed)), counter_(kGolden) {}

void Hasher::Copy(uint8_t* to, const uint8_t* from, size_t num_bytes, bool stream) {
  size_t num_words = 0;
  if (num_pending_ == 0) {
    num_words = num_bytes / kWordBytes;
    sum_ += CopyAndAccumulate(to, from, num_words, counter_, stream);
    counter_ += num_words * kGolden;
    num_bytes_ += num_words * kWordBytes;
  }
  for (size_t done = num_words * kWordBytes; done < num_bytes;) {
    const size_t piece = std::min(kPieceBytes, num_bytes - done);
    std::memcpy(to + done, from + done, piece);
    Update(to + done, piece);
    done += piece;
  }
}

void Hasher::Update(const uint8_t* data, size_t num_bytes) {
  if (num_bytes == 0) return;
  num_bytes_ += num_bytes;
  if (num_pending_ != 0) {
    const size_t taken = std::min(num_bytes, kWordBytes - num_pending_);
    std::memcpy(pending_ + num_pending_, data, taken);
    num_pending_ += taken;
    data += taken;
    num_bytes -= taken;
    if (num_pending_ < kWordBytes) return;
    AddWords(pending_, 1);
  }
  const size_t num_words = num_bytes / kWordBytes;
  AddWords(data, num_words);
  num_pending_ = num_bytes % kWordBytes;
  std::memcpy(pending_, data + num_words * kWordBytes, num_pending_);
}

uint64_t Hasher::Finish() {
  if (num_pending_ != 0) {
    std::memset(pending_ + num_pending_, 0, kWordBytes - num_pending_);
    AddWords(pending_, 1);
    num_pending_ = 0;
  }
  return Mix(sum_ ^ (num_bytes_ * kGolden));
}

void Hasher::AddWords(const uint8_t* data, size_t num_words) {
  sum_ += Accumulate(data, num_words, counter_);
  counter_ += num_words * kGolden;
}

uint64_t Checksum(const uint8_t* data, size_t num_bytes, uint64_t seed) {
  Hasher hasher(seed);
  hasher.Update(data, num_bytes);
  return hasher.Finish();
}

}  // namespace vllm_ascend_pd
