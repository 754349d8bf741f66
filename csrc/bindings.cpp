// The only file that sees Python. C++ below it doesn't drop a last reference to what Python made (arguments are
// borrowed for the length of a call) but in hand_over(), which has the GIL, and takes the GIL only to ask for free
// memory, when batches grow, and for signals.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device_copier.h"
#include "outputs.h"

namespace {

namespace py = pybind11;
using namespace gpuprefetch;
using release_gil = py::call_guard<py::gil_scoped_release>;

// One for the process, with as many threads as who asks first says. Leaked on purpose: threads must not be joined by a
// static destructor. Python calls shutdown() before it ends.
MemcpyPool& pool(int threads) {
  static auto* pool = new MemcpyPool(threads);
  return *pool;
}

std::vector<Event> events_of(const std::vector<std::uintptr_t>& handles) {
  std::vector<Event> events;
  events.reserve(handles.size());
  for (const auto handle : handles) events.push_back(reinterpret_cast<Event>(handle));
  return events;
}

// With num_threads=0 it is the main thread that waits, and Ctrl-C must end that.
void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// The tensors to be copied as bytes, none of a subclass, and all else, in order. One call for a batch: it may have
// hundreds of leaves.
py::tuple split(const py::list& leaves) {
  const py::object tensor = py::module_::import("torch").attr("Tensor");
  py::list plain, others;
  for (const py::handle leaf : leaves) {
    const bool is_tensor = py::type::handle_of(leaf).is(tensor);
    (is_tensor && is_plain(py::cast<at::Tensor>(leaf)) ? plain : others).append(leaf);
  }
  return py::make_tuple(plain, others);
}

std::string compiler() {
#if defined(_MSC_VER)
  return "MSVC " + std::to_string(_MSC_FULL_VER);
#elif defined(__clang__)
  return std::string("Clang ") + __clang_version__;
#else
  return std::string("GCC ") + __VERSION__;
#endif
}

// MSVC does not tell of /O2; its debug library stands for a debug build there.
#if defined(__OPTIMIZE__) || (defined(_MSC_VER) && !defined(_DEBUG))
constexpr bool kOptimized = true;
#else
constexpr bool kOptimized = false;
#endif

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const OutOfDeviceMemory& e) {
    py::set_error(py::module_::import("torch").attr("OutOfMemoryError"), e.what());
  }
}

}  // namespace

// Nothing here relies on the GIL: see "Free-threaded Python" in docs/design.md.
PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
  m.attr("TORCH_VERSION_MAJOR") = TORCH_VERSION_MAJOR;
  m.attr("TORCH_VERSION_MINOR") = TORCH_VERSION_MINOR;
  m.attr("COMPILER") = compiler();
  m.attr("OPTIMIZED") = kOptimized;

  py::register_local_exception_translator(&translate);

  m.def("split", &split, py::arg("leaves"));
  m.def("can_gather", &can_gather, py::arg("samples"));
  // For the tests, which look at it on the CPU: what put() would copy to.
  m.def(
      "allocate",
      [](const std::vector<at::Tensor>& tensors, const std::vector<std::vector<at::Tensor>>& stacks,
         c10::Device device) {
        const Sources sources{tensors, stacks};
        return allocate(sources, lay_out(sources), device).tensors;
      },
      py::arg("tensors"), py::arg("stacks"), py::arg("device"));
  m.def("shutdown", [] { pool(0).shutdown(); }, release_gil());

  py::class_<DeviceCopier, std::shared_ptr<DeviceCopier>>(m, "DeviceCopier")
      .def(py::init([](c10::Stream stream, int copy_threads) {
             return std::make_shared<DeviceCopier>(stream, pool(copy_threads));
           }),
           py::arg("stream"), py::arg("copy_threads"))
      .def(
          "set_ring",
          [](DeviceCopier& copier, std::uintptr_t memory, std::size_t piece_bytes,
             const std::vector<std::uintptr_t>& events) { copier.set_ring(memory, piece_bytes, events_of(events)); },
          py::arg("memory"), py::arg("piece_bytes"), py::arg("events"), release_gil())
      .def("leak_handed_over", &DeviceCopier::leak_handed_over);

  // ask() and hand_over() keep the GIL: they take microseconds, and a thread that gives it away beside a busy loader
  // thread gets it back milliseconds later.
  py::class_<Lane>(m, "Lane")
      .def(py::init([](std::shared_ptr<DeviceCopier> copier, std::int64_t prefetch_batches,
                       const std::vector<std::uintptr_t>& events, std::int64_t overdue_ms,
                       std::function<std::int64_t()> free_bytes) {
             return std::make_unique<Lane>(std::move(copier), prefetch_batches, events_of(events),
                                           std::chrono::milliseconds(overdue_ms), std::move(free_bytes));
           }),
           py::arg("copier"), py::arg("prefetch_batches"), py::arg("events"), py::arg("overdue_ms"),
           py::arg("free_bytes"))
      .def_static("events_needed", &Lane::events_needed, py::arg("prefetch_batches"))
      .def("ask", &Lane::ask)
      .def(
          "wait_until_due", [](Lane& lane, std::int64_t batch) { return lane.wait_until_due(batch, &check_signals); },
          py::arg("batch"), release_gil())
      .def("wait_for_room", &Lane::wait_for_room, py::arg("batch"), py::arg("bytes"), release_gil())
      .def(
          "put",
          [](Lane& lane, std::int64_t batch, const std::vector<at::Tensor>& tensors,
             const std::vector<std::vector<at::Tensor>>& stacks, std::int64_t other_bytes,
             bool finish) -> std::optional<std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>> {
            auto outputs = lane.put(batch, {tensors, stacks}, other_bytes, finish);
            if (!outputs) return std::nullopt;
            return std::pair(std::move(outputs->tensors), std::move(outputs->storages));
          },
          py::arg("batch"), py::arg("tensors"), py::arg("stacks"), py::arg("other_bytes"), py::arg("finish"),
          release_gil())
      .def("hand_over", &Lane::hand_over, py::arg("batch"), py::arg("held"))
      // The callback of a weak reference too, which is given the reference.
      .def("stop", [](Lane& lane, const py::args&) { lane.stop(); })
      .def_property_readonly("overdue", &Lane::overdue);
}
