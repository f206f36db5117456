// SPDX-License-Identifier: Apache-2.0

#include "page_ring.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace vllm_ascend_pd {
namespace {

using Clock = std::chrono::steady_clock;

// Shorter than going to sleep and being woken takes.
constexpr std::chrono::microseconds kSpin{40};
constexpr int kSpinsBetweenClocks = 64;
// A wake that was missed costs so much at most.
constexpr std::chrono::microseconds kMaxSleep{500};

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

long Futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr,
                 0);
}

// Until word, which the other process changes, makes is_ready() true; false after the patience.
template <typename IsReady>
bool WaitFor(std::atomic<uint32_t>* word, std::atomic<uint32_t>* sleeps,
             std::chrono::microseconds spin, int64_t patience_us, IsReady is_ready) {
  if (is_ready()) return true;
  const auto start = Clock::now();
  const auto deadline = start + std::chrono::microseconds(patience_us);
  for (auto now = start; now < std::min(deadline, start + spin); now = Clock::now()) {
    for (int i = 0; i < kSpinsBetweenClocks; ++i) {
      Pause();
      if (is_ready()) return true;
    }
  }
  bool ready = is_ready();
  for (auto now = Clock::now(); !ready && now < deadline; now = Clock::now()) {
    const uint32_t seen = word->load(std::memory_order_acquire);
    sleeps->store(1, std::memory_order_seq_cst);
    ready = is_ready();
    if (!ready) {
      const auto left = std::min<Clock::duration>(deadline - now, kMaxSleep);
      const auto left_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
      const timespec timeout{0, static_cast<long>(left_ns)};
      Futex(word, FUTEX_WAIT, seen, &timeout);
      ready = is_ready();
    }
    sleeps->store(0, std::memory_order_relaxed);
  }
  return ready;
}

void Wake(std::atomic<uint32_t>* word, const std::atomic<uint32_t>& sleeps) {
  if (sleeps.load(std::memory_order_seq_cst) != 0) Futex(word, FUTEX_WAKE, 1, nullptr);
}

void Tell(std::atomic<uint32_t>* word, uint32_t value, const std::atomic<uint32_t>& sleeps) {
  word->store(value, std::memory_order_seq_cst);
  Wake(word, sleeps);
}

// Leaves the core on which the other end runs, or the two would take turns: the kernel puts a
// thread that is woken where its waker runs, and with few cores hardly looks for an idle one.
void StepAside(int cpu) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  cpu_set_t others = allowed;
  CPU_CLR(static_cast<size_t>(cpu), &others);
  if (sched_setaffinity(0, sizeof(others), &others) == 0) {
    sched_setaffinity(0, sizeof(allowed), &allowed);
  }
}

uint32_t NumChunks(size_t ring_bytes) {
  return static_cast<uint32_t>(
      std::min(kRingMaxChunks, (ring_bytes - kRingHeaderBytes) / kRingChunkBytes));
}

}  // namespace

PageWalk::PageWalk(const PageList& pages, uint64_t seed)
    : base_(pages.base),
      layer_offsets_(pages.layer_offsets, pages.layer_offsets + pages.num_layers),
      block_strides_(pages.block_strides, pages.block_strides + pages.num_layers),
      block_ids_(pages.block_ids, pages.block_ids + pages.num_blocks),
      page_bytes_(pages.page_bytes),
      num_bytes_left_(pages.num_layers * pages.num_blocks * pages.page_bytes),
      hasher_(seed) {}

template <typename Copy>
void PageWalk::Walk(size_t num_bytes, Copy copy) {
  num_bytes_left_ -= num_bytes;
  for (size_t done = 0; done < num_bytes;) {
    uint8_t* const page =
        base_ + layer_offsets_[layer_] + block_ids_[block_] * block_strides_[layer_] + in_page_;
    const size_t count = std::min(page_bytes_ - in_page_, num_bytes - done);
    copy(page, done, count);
    done += count;
    in_page_ += count;
    if (in_page_ < page_bytes_) continue;
    in_page_ = 0;
    if (++block_ < block_ids_.size()) continue;
    block_ = 0;
    ++layer_;
  }
}

void PageWalk::Gather(uint8_t* to, size_t num_bytes) {
  Walk(num_bytes, [&](const uint8_t* page, size_t offset, size_t count) {
    hasher_.Copy(to + offset, page, count, false);
  });
}

void PageWalk::Scatter(const uint8_t* from, size_t num_bytes) {
  Walk(num_bytes, [&](uint8_t* page, size_t offset, size_t count) {
    hasher_.Copy(page, from + offset, count, false);
  });
}

RingPacker::RingPacker(const PageList& pages, uint8_t* ring, size_t ring_bytes, uint64_t key)
    : header_(reinterpret_cast<RingHeader*>(ring)),
      chunks_(ring + kRingHeaderBytes),
      num_chunks_(NumChunks(ring_bytes)),
      key_(key),
      walk_(pages, key) {}

PackStatus RingPacker::Run(int64_t patience_us) {
  const auto is_ours = [&] { return header_->key.load(std::memory_order_acquire) == key_; };
  const auto has_room = [&] {
    return num_packed_ - header_->num_placed.load(std::memory_order_acquire) < num_chunks_ ||
           !is_ours();
  };
  while (walk_.num_bytes_left() != 0) {
    if (!WaitFor(&header_->num_placed, &header_->packer_sleeps, kSpin, patience_us, has_room)) {
      return PackStatus::kWaiting;
    }
    if (!is_ours()) return PackStatus::kEnded;
    header_->packer_cpu.store(sched_getcpu(), std::memory_order_relaxed);
    const size_t num_bytes = std::min(kRingChunkBytes, walk_.num_bytes_left());
    walk_.Gather(chunks_ + num_packed_ % num_chunks_ * kRingChunkBytes, num_bytes);
    if (walk_.num_bytes_left() == 0) checksum_ = walk_.Finish();
    if (!is_ours()) return PackStatus::kEnded;
    Tell(&header_->num_packed, ++num_packed_, header_->placer_sleeps);
  }
  return PackStatus::kDone;
}

void RingPacker::Confirm() {
  // The last word: from here on the ring may be that of another transfer.
  header_->answer.store(checksum_, std::memory_order_seq_cst);
  Wake(&header_->num_packed, header_->placer_sleeps);
}

RingPlacer::RingPlacer(const PageList& pages, uint8_t* ring, size_t ring_bytes, uint64_t key)
    : header_(reinterpret_cast<RingHeader*>(ring)),
      chunks_(ring + kRingHeaderBytes),
      num_chunks_(NumChunks(ring_bytes)),
      key_(key),
      walk_(pages, key) {
  End();
  header_->num_packed.store(0, std::memory_order_relaxed);
  header_->packer_sleeps.store(0, std::memory_order_relaxed);
  header_->packer_cpu.store(-1, std::memory_order_relaxed);
  header_->answer.store(0, std::memory_order_relaxed);
  header_->num_placed.store(0, std::memory_order_relaxed);
  header_->placer_sleeps.store(0, std::memory_order_relaxed);
  header_->key.store(key, std::memory_order_release);
}

bool RingPlacer::has_chunk() const {
  const uint32_t num_ahead = header_->num_packed.load(std::memory_order_acquire) - num_placed_;
  // The key last: a ring that was taken for something else meanwhile shows it.
  return num_ahead != 0 && num_ahead <= num_chunks_ &&
         header_->key.load(std::memory_order_acquire) == key_;
}

bool RingPlacer::Wait(int64_t patience_us) const {
  return walk_.num_bytes_left() == 0 ||
         WaitFor(&header_->num_packed, &header_->placer_sleeps, std::chrono::microseconds(0),
                 patience_us, [&] { return has_chunk(); });
}

bool RingPlacer::Run(int64_t patience_us) {
  bool has_stepped_aside = false;
  while (walk_.num_bytes_left() != 0) {
    const int cpu = sched_getcpu();
    if (!has_stepped_aside && header_->packer_cpu.load(std::memory_order_relaxed) == cpu) {
      StepAside(cpu);
      has_stepped_aside = true;
    }
    if (!WaitFor(&header_->num_packed, &header_->placer_sleeps, kSpin, patience_us,
                 [&] { return has_chunk(); })) {
      return false;
    }
    const size_t num_bytes = std::min(kRingChunkBytes, walk_.num_bytes_left());
    walk_.Scatter(chunks_ + num_placed_ % num_chunks_ * kRingChunkBytes, num_bytes);
    if (walk_.num_bytes_left() == 0) checksum_ = walk_.Finish();
    Tell(&header_->num_placed, ++num_placed_, header_->packer_sleeps);
  }
  return true;
}

bool RingPlacer::IsConfirmed(int64_t patience_us) const {
  // An answer to another transfer is another number.
  return checksum_ != 0 &&
         WaitFor(&header_->num_packed, &header_->placer_sleeps, kSpin, patience_us,
                 [&] { return header_->answer.load(std::memory_order_acquire) == checksum_; });
}

void RingPlacer::End() {
  header_->key.store(0, std::memory_order_release);
  Tell(&header_->num_placed, num_placed_, header_->packer_sleeps);
}

}  // namespace vllm_ascend_pd
