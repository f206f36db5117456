// SPDX-License-Identifier: Apache-2.0
//
// vllm_ascend_pd._C: checks every argument, then releases the GIL once for the whole call.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "block_copy.h"
#include "checksum.h"
#include "page_ring.h"

namespace py = pybind11;

namespace vllm_ascend_pd {
namespace {

using Int64Array = py::array_t<int64_t, py::array::c_style>;

// Sizes and offsets of every region fit in int64_t, so sums of two never wrap in uint64_t.
constexpr uint64_t kMaxBytes = std::numeric_limits<int64_t>::max();

// A range of host memory that the caller keeps mapped.
struct Region {
  uint64_t base;
  uint64_t size;

  Region(uint64_t base_addr, uint64_t num_bytes) : base(base_addr), size(num_bytes) {
    if (base == 0 || size == 0 || size > kMaxBytes ||
        base > std::numeric_limits<uint64_t>::max() - size) {
      throw py::value_error("not a memory region: base=" + std::to_string(base) +
                            ", size=" + std::to_string(size));
    }
  }

  uint8_t* data() const { return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(base)); }
};

[[noreturn]] void ThrowBadElement(const char* name, py::ssize_t index, int64_t value,
                                  const Region& region, const std::string& why) {
  throw py::value_error(std::string(name) + "[" + std::to_string(index) +
                        "] = " + std::to_string(value) + why + " the region of " +
                        std::to_string(region.size) + " bytes");
}

void CheckRange(const char* name, const Region& region, int64_t offset, uint64_t num_bytes) {
  if (offset < 0 || num_bytes > region.size ||
      static_cast<uint64_t>(offset) > region.size - num_bytes) {
    throw py::value_error(std::string(name) + " range of " + std::to_string(num_bytes) +
                          " bytes at offset " + std::to_string(offset) + " leaves the region of " +
                          std::to_string(region.size) + " bytes");
  }
}

void CheckVector(const char* name, const Int64Array& array) {
  if (array.ndim() != 1) {
    throw py::type_error(std::string(name) + " must be a C-contiguous int64 vector");
  }
}

// Refuses every page that would leave its region. O(num_layers + num_blocks), not their product.
void CheckPages(const Region& region, const Int64Array& layer_offsets,
                const Int64Array& block_strides, const Int64Array& block_ids, int64_t page_bytes) {
  CheckVector("layer_offsets", layer_offsets);
  CheckVector("block_strides", block_strides);
  CheckVector("block_ids", block_ids);
  if (block_strides.size() != layer_offsets.size()) {
    throw py::value_error(std::to_string(block_strides.size()) + " block_strides of " +
                          std::to_string(layer_offsets.size()) + " layers");
  }
  const int64_t last_start = static_cast<int64_t>(region.size) - page_bytes;
  int64_t max_block_id = std::numeric_limits<int64_t>::max();
  for (py::ssize_t i = 0; i < layer_offsets.size(); ++i) {
    const int64_t stride = block_strides.data()[i];
    if (page_bytes <= 0 || page_bytes > stride) {
      throw py::value_error("need 0 < page_bytes <= block_stride, got " +
                            std::to_string(page_bytes) + ", " + std::to_string(stride));
    }
    const int64_t offset = layer_offsets.data()[i];
    if (offset < 0 || offset > last_start) {
      ThrowBadElement("layer_offsets", i, offset, region,
                      " puts a page of " + std::to_string(page_bytes) + " bytes outside");
    }
    max_block_id = std::min(max_block_id, (last_start - offset) / stride);
  }
  for (py::ssize_t i = 0; i < block_ids.size(); ++i) {
    const int64_t block_id = block_ids.data()[i];
    if (layer_offsets.size() != 0 && (block_id < 0 || block_id > max_block_id)) {
      ThrowBadElement("block_ids", i, block_id, region, " lies outside");
    }
  }
}

// Bytes that all pages take in staging; refuses what no address space can hold.
uint64_t StagingBytes(const PageList& pages) {
  uint64_t num_pages = 0;
  uint64_t num_bytes = 0;
  if (__builtin_mul_overflow(pages.num_layers, pages.num_blocks, &num_pages) ||
      __builtin_mul_overflow(num_pages, pages.page_bytes, &num_bytes)) {
    throw py::value_error("the pages do not fit in any staging region");
  }
  return num_bytes;
}

bool Overlap(const Region& a, const Region& b) {
  return a.base < b.base + b.size && b.base < a.base + a.size;
}

// Refuses what lies outside the staging region, and one that overlaps the region of the pages.
void CheckStaging(const Region& region, const Region& staging, int64_t staging_offset,
                  uint64_t num_bytes) {
  CheckRange("staging", staging, staging_offset, num_bytes);
  if (Overlap(region, staging)) {
    throw py::value_error("the staging region overlaps the region of the pages");
  }
}

PageList CheckedPages(const Region& region, const Int64Array& layer_offsets,
                      const Int64Array& block_strides, const Int64Array& block_ids,
                      int64_t page_bytes) {
  CheckPages(region, layer_offsets, block_strides, block_ids, page_bytes);
  return PageList{region.data(),
                  layer_offsets.data(),
                  block_strides.data(),
                  static_cast<size_t>(layer_offsets.size()),
                  block_ids.data(),
                  static_cast<size_t>(block_ids.size()),
                  static_cast<size_t>(page_bytes)};
}

// Checks, then calls copy(pages, staging_data) without the GIL.
template <typename Copy>
uint64_t CheckedCopy(const Region& region, const Int64Array& layer_offsets,
                     const Int64Array& block_strides, const Int64Array& block_ids,
                     int64_t page_bytes, const Region& staging, int64_t staging_offset, Copy copy) {
  const PageList pages = CheckedPages(region, layer_offsets, block_strides, block_ids, page_bytes);
  CheckStaging(region, staging, staging_offset, StagingBytes(pages));
  py::gil_scoped_release release;
  return copy(pages, staging.data() + staging_offset);
}

uint64_t GatherChecked(const Region& region, const Int64Array& layer_offsets,
                       const Int64Array& block_strides, const Int64Array& block_ids,
                       int64_t page_bytes, const Region& staging, int64_t staging_offset,
                       uint64_t seed) {
  return CheckedCopy(
      region, layer_offsets, block_strides, block_ids, page_bytes, staging, staging_offset,
      [seed](const PageList& pages, uint8_t* data) { return Gather(pages, data, seed); });
}

// The values of the blocks lie value_stride apart, the pages of the first one at staging_offset;
// this copies those of the layers from first_layer on.
py::array_t<uint64_t> GatherLayersChecked(const Region& region, const Int64Array& layer_offsets,
                                          const Int64Array& block_strides,
                                          const Int64Array& block_ids, int64_t page_bytes,
                                          const Region& staging, int64_t staging_offset,
                                          int64_t value_stride, int64_t first_layer) {
  const PageList pages = CheckedPages(region, layer_offsets, block_strides, block_ids, page_bytes);
  if (page_bytes % sizeof(uint64_t) != 0) {
    throw py::value_error("page_bytes must be a multiple of 8, not " + std::to_string(page_bytes));
  }
  uint64_t stop = 0;
  uint64_t value_bytes = 0;
  uint64_t num_bytes = 0;
  if (first_layer < 0 || value_stride < 0 ||
      __builtin_add_overflow(static_cast<uint64_t>(first_layer), pages.num_layers, &stop) ||
      __builtin_mul_overflow(stop, static_cast<uint64_t>(page_bytes), &value_bytes) ||
      value_bytes > static_cast<uint64_t>(value_stride) ||
      __builtin_mul_overflow(pages.num_blocks, static_cast<uint64_t>(value_stride), &num_bytes)) {
    throw py::value_error("layers from " + std::to_string(first_layer) +
                          " on do not fit in a value of " + std::to_string(value_stride) +
                          " bytes");
  }
  // What follows the pages of the last value is not touched.
  if (pages.num_blocks != 0) num_bytes -= static_cast<uint64_t>(value_stride) - value_bytes;
  CheckStaging(region, staging, staging_offset, num_bytes);
  py::array_t<uint64_t> sums(block_ids.size());
  uint64_t* const data = sums.mutable_data();
  const auto first_byte = static_cast<uint64_t>(first_layer) * static_cast<uint64_t>(page_bytes);
  {
    py::gil_scoped_release release;
    GatherLayers(pages, staging.data() + staging_offset + first_byte,
                 static_cast<size_t>(value_stride), first_byte / sizeof(uint64_t), data);
  }
  return sums;
}

uint64_t ScatterChecked(const Region& region, const Int64Array& layer_offsets,
                        const Int64Array& block_strides, const Int64Array& block_ids,
                        int64_t page_bytes, const Region& staging, int64_t staging_offset,
                        uint64_t seed) {
  return CheckedCopy(
      region, layer_offsets, block_strides, block_ids, page_bytes, staging, staging_offset,
      [seed](const PageList& pages, const uint8_t* data) { return Scatter(pages, data, seed); });
}

uint64_t ChecksumChecked(const Region& region, int64_t offset, int64_t num_bytes, uint64_t seed) {
  // A negative size becomes one that no region holds.
  CheckRange("region", region, offset, static_cast<uint64_t>(num_bytes));
  py::gil_scoped_release release;
  return Checksum(region.data() + offset, static_cast<size_t>(num_bytes), seed);
}

// One end of a ring, made of checked arguments.
template <typename End>
std::unique_ptr<End> MakeEnd(const Region& region, const Int64Array& layer_offsets,
                             const Int64Array& block_strides, const Int64Array& block_ids,
                             int64_t page_bytes, const Region& ring, uint64_t key) {
  const PageList pages = CheckedPages(region, layer_offsets, block_strides, block_ids, page_bytes);
  StagingBytes(pages);
  if (Overlap(region, ring)) throw py::value_error("the ring overlaps the region of the pages");
  if (key == 0) throw py::value_error("a ring's key is not 0");
  if (ring.base % alignof(RingHeader) != 0 || ring.size < kRingHeaderBytes + 2 * kRingChunkBytes) {
    throw py::value_error("not a ring: base=" + std::to_string(ring.base) +
                          ", size=" + std::to_string(ring.size));
  }
  return std::make_unique<End>(pages, ring.data(), static_cast<size_t>(ring.size), key);
}

template <typename End>
void DefineEnd(py::class_<End>& end) {
  end.def(py::init(&MakeEnd<End>), py::arg("pages"), py::arg("layer_offsets").noconvert(),
          py::arg("block_strides").noconvert(), py::arg("block_ids").noconvert(),
          py::arg("page_bytes"), py::arg("ring"), py::arg("key"))
      .def("run", &End::Run, py::arg("patience_us"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("num_bytes_left", &End::num_bytes_left)
      .def_property_readonly("checksum", &End::checksum);
}

}  // namespace
}  // namespace vllm_ascend_pd

PYBIND11_MODULE(_C, module) {
  using vllm_ascend_pd::Region;
  module.doc() = "Native KV page copies; see vllm_ascend_pd.backends.block_copy.";
  module.attr("VERSION") = 2;
  py::class_<Region>(module, "Region")
      .def(py::init<uint64_t, uint64_t>(), py::arg("base"), py::arg("size"))
      .def_readonly("base", &Region::base)
      .def_readonly("size", &Region::size);
  // noconvert: a hidden copy of a list or of another dtype would cost more than the call.
  module.def("gather", &vllm_ascend_pd::GatherChecked, py::arg("pages"),
             py::arg("layer_offsets").noconvert(), py::arg("block_strides").noconvert(),
             py::arg("block_ids").noconvert(), py::arg("page_bytes"), py::arg("staging"),
             py::arg("staging_offset"), py::arg("seed"));
  module.def("gather_layers", &vllm_ascend_pd::GatherLayersChecked, py::arg("pages"),
             py::arg("layer_offsets").noconvert(), py::arg("block_strides").noconvert(),
             py::arg("block_ids").noconvert(), py::arg("page_bytes"), py::arg("staging"),
             py::arg("staging_offset"), py::arg("value_stride"), py::arg("first_layer"));
  module.def("scatter", &vllm_ascend_pd::ScatterChecked, py::arg("pages"),
             py::arg("layer_offsets").noconvert(), py::arg("block_strides").noconvert(),
             py::arg("block_ids").noconvert(), py::arg("page_bytes"), py::arg("staging"),
             py::arg("staging_offset"), py::arg("seed"));
  module.def("checksum", &vllm_ascend_pd::ChecksumChecked, py::arg("region"), py::arg("offset"),
             py::arg("num_bytes"), py::arg("seed"));

  using vllm_ascend_pd::PackStatus;
  using vllm_ascend_pd::RingPacker;
  using vllm_ascend_pd::RingPlacer;
  py::enum_<PackStatus>(module, "PackStatus")
      .value("DONE", PackStatus::kDone)
      .value("WAITING", PackStatus::kWaiting)
      .value("ENDED", PackStatus::kEnded);
  py::class_<RingPacker> packer(module, "RingPacker");
  vllm_ascend_pd::DefineEnd(packer);
  packer.def("confirm", &RingPacker::Confirm);
  py::class_<RingPlacer> placer(module, "RingPlacer");
  vllm_ascend_pd::DefineEnd(placer);
  placer
      .def("wait", &RingPlacer::Wait, py::arg("patience_us"),
           py::call_guard<py::gil_scoped_release>())
      .def("is_confirmed", &RingPlacer::IsConfirmed, py::arg("patience_us"),
           py::call_guard<py::gil_scoped_release>())
      .def("end", &RingPlacer::End);
  module.attr("RING_ALIGNMENT") = alignof(vllm_ascend_pd::RingHeader);
  module.attr("RING_MIN_BYTES") =
      vllm_ascend_pd::kRingHeaderBytes + 2 * vllm_ascend_pd::kRingChunkBytes;
}
