// Declarations only, for syntax checks: what libc++ expects of Microsoft's header of this name.
#pragma once
#include <stddef.h>
namespace std {
enum class align_val_t : size_t {};
struct nothrow_t {
  explicit nothrow_t() = default;
};
extern nothrow_t const nothrow;
}  // namespace std
void* operator new(size_t);
void* operator new(size_t, std::nothrow_t const&) noexcept;
void* operator new[](size_t);
void* operator new[](size_t, std::nothrow_t const&) noexcept;
void operator delete(void*) noexcept;
void operator delete(void*, size_t) noexcept;
void operator delete[](void*) noexcept;
void operator delete[](void*, size_t) noexcept;
void* operator new(size_t, std::align_val_t);
void operator delete(void*, std::align_val_t) noexcept;
void operator delete(void*, size_t, std::align_val_t) noexcept;
void* operator new(size_t, std::align_val_t, std::nothrow_t const&) noexcept;
inline void* operator new(size_t, void* p) noexcept { return p; }
inline void operator delete(void*, void*) noexcept {}
inline void* operator new[](size_t, void* p) noexcept { return p; }
inline void operator delete[](void*, void*) noexcept {}
