#include "outputs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <utility>

namespace gpuprefetch {
namespace {

int dtype_of(const at::Tensor& tensor) { return static_cast<int>(tensor.scalar_type()); }

// Hands out the tensors of a layout, one after another.
class Allocation {
 public:
  Allocation(const Layout& layout, c10::Device device) : layout_(layout), device_(device) {
    outputs_.storages.resize(layout.storages.size());
    outputs_.tensors.reserve(layout.places.size());
  }

  // `make(device)` makes an ordinary tensor; `shape()` gives one of the same sizes and strides, wherever it is.
  template <typename Make, typename Shape>
  void add(const at::TensorOptions& options, Make make, Shape shape) {
    const Layout::Place place = layout_.places[outputs_.tensors.size()];
    const Layout::Storage& storage = layout_.storages[place.storage];
    at::Tensor& whole = outputs_.storages[place.storage];
    if (storage.leaves == 1) {
      whole = make(device_);
      outputs_.tensors.push_back(whole);
      return;
    }
    const std::size_t itemsize = options.dtype().itemsize();
    if (!whole.defined()) {
      whole = at::empty({static_cast<std::int64_t>(storage.bytes / itemsize)}, options.device(device_));
      // A leaf that outgrew its place would lie over its neighbours, and a storage of 0 bytes would take them along.
      whole.storage().unsafeGetStorageImpl()->set_resizable(false);
    }
    auto part = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole.storage()), whole.key_set(), whole.dtype());
    const at::Tensor like = shape();
    part.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                      static_cast<std::int64_t>(place.offset / itemsize));
    outputs_.tensors.push_back(std::move(part));
  }

  Outputs take() { return std::move(outputs_); }

 private:
  const Layout& layout_;
  const c10::Device device_;
  Outputs outputs_;
};

}  // namespace

Layout lay_out(const Sources& sources) {
  std::vector<Leaf> leaves;
  leaves.reserve(sources.tensors.size() + sources.stacks.size());
  for (const auto& tensor : sources.tensors) leaves.push_back({tensor.nbytes(), dtype_of(tensor)});
  for (const auto& samples : sources.stacks) {
    leaves.push_back({samples.front().nbytes() * samples.size(), dtype_of(samples.front())});
  }
  return lay_out(leaves);
}

Outputs allocate(const Sources& sources, const Layout& layout, c10::Device device) {
  Allocation allocation(layout, device);
  for (const auto& tensor : sources.tensors) {
    const auto make = [&](c10::Device place) {
      return at::empty_like(tensor, tensor.options().device(place), at::MemoryFormat::Preserve);
    };
    // Dense ones keep their strides; what those of others become is torch's to say.
    const auto shape = [&] { return tensor.is_non_overlapping_and_dense() ? tensor : make(c10::kMeta); };
    allocation.add(tensor.options(), make, shape);
  }
  for (const auto& samples : sources.stacks) {
    const at::TensorOptions options = samples.front().options();
    auto sizes = samples.front().sizes().vec();
    sizes.insert(sizes.begin(), static_cast<std::int64_t>(samples.size()));
    const auto make = [&](c10::Device place) { return at::empty(sizes, options.device(place)); };
    allocation.add(options, make, [&] { return make(c10::kMeta); });
  }
  return allocation.take();
}

}  // namespace gpuprefetch
