// The standard-library part as a Python module: what the check loads into Windows CPython, where gpuprefetch._C can't
// be linked. The device behind it is the simulated one of the C++ tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "memcpy_pool.h"
#include "pinned_ring.h"
#include "simulated_device.h"
#include "staged_copy.h"

namespace {

namespace py = pybind11;
using namespace gpuprefetch;
using release_gil = py::call_guard<py::gil_scoped_release>;

std::byte* at(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

// Leaked on purpose, as in csrc/bindings.cpp.
MemcpyPool& pool() {
  static auto* pool = new MemcpyPool(2);
  return *pool;
}

// Copies through a ring in memory of the caller's, which must outlive it.
class Copier {
 public:
  Copier(std::uintptr_t ring, std::size_t piece_bytes, std::int64_t pieces)
      : device_(SimulatedDevice::Pace::kLate, 1),
        stream_(device_.make_stream()),
        ring_(at(ring), piece_bytes, device_.make_events(pieces)) {
    device_.pin(at(ring), piece_bytes * static_cast<std::size_t>(pieces));
  }
  ~Copier() { device_.finish(); }

  // `sources`, addresses and sizes in bytes, one after the other to `to`.
  void copy(std::uintptr_t to, const std::vector<std::pair<std::uintptr_t, std::size_t>>& sources) {
    Destination destination{at(to), 0, {}};
    for (const auto& [from, bytes] : sources) {
      destination.extents.push_back(Extent{at(from), destination.bytes, bytes});
      destination.bytes += bytes;
    }
    staged_copy({destination}, ring_, pool(), stream_);
  }

  void finish() { device_.finish(); }
  void hold() { stream_.hold(); }
  void let_go() { stream_.let_go(); }
  void await_sleeper() { device_.await_sleepers(1); }
  void fail_at(std::int64_t copy) { stream_.fail_at(SimulatedDevice::Call::kCopy, copy); }
  std::int64_t overwritten() const { return device_.overwritten(); }

 private:
  SimulatedDevice device_;
  SimulatedDevice::Stream& stream_;
  PinnedRing ring_;
};

}  // namespace

PYBIND11_MODULE(core_module, m) {
  m.def("shutdown", [] { pool().shutdown(); }, release_gil());
  py::class_<Copier>(m, "Copier")
      .def(py::init<std::uintptr_t, std::size_t, std::int64_t>(), py::arg("ring"), py::arg("piece_bytes"),
           py::arg("pieces"))
      .def("copy", &Copier::copy, py::arg("to"), py::arg("sources"), release_gil())
      .def("finish", &Copier::finish, release_gil())
      .def("hold", &Copier::hold, release_gil())
      .def("let_go", &Copier::let_go)
      .def("await_sleeper", &Copier::await_sleeper, release_gil())
      .def("fail_at", &Copier::fail_at, py::arg("copy"))
      .def("overwritten", &Copier::overwritten);
}
