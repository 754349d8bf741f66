// The tensors that a batch is copied to. ATen and c10 only, no CUDA header.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "packing.h"

namespace gpuprefetch {

// What a batch is copied from: plain tensors, and stacks of samples that can_gather() admits.
struct Sources {
  const std::vector<at::Tensor>& tensors;
  const std::vector<std::vector<at::Tensor>>& stacks;
};

struct Outputs {
  std::vector<at::Tensor> tensors;   // for each of Sources::tensors, then for each stack
  std::vector<at::Tensor> storages;  // for each storage of the layout, a tensor that begins where it does
};

// Of the tensors first, then of the stacks.
Layout lay_out(const Sources& sources);

// Uninitialized, with the strides of `tensor.to(device)`. Small ones share storages as the layout says, and are tensors
// of their own all the same, no views: each has its own version counter, which autograd relies on. A storage that is
// shared is one allocation, since Tensor.record_stream() does nothing for memory that isn't the start of one.
Outputs allocate(const Sources& sources, const Layout& layout, c10::Device device);

}  // namespace gpuprefetch
