// Counts what each thread allocates, and refuses it where a test says so. Replaces the global operators: include it in
// one source of a program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

// That many more by this thread, then one is refused. Negative: no limit.
static thread_local std::int64_t allocations_left = -1;
static thread_local std::int64_t allocations = 0;

// GCC would see free() where a delete is inlined, and take it for a mismatch.
static void (*volatile give_back)(void*) = std::free;

void* operator new(std::size_t bytes) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { give_back(memory); }
void operator delete(void* memory, std::size_t) noexcept { give_back(memory); }
