// Declarations only, for syntax checks: what libc++ expects of Microsoft's header of this name.
#pragma once
namespace std {
class exception {
 public:
  exception() noexcept {}
  explicit exception(char const*) noexcept {}
  exception(char const*, int) noexcept {}
  exception(exception const&) noexcept {}
  exception& operator=(exception const&) noexcept { return *this; }
  virtual ~exception() noexcept {}
  virtual char const* what() const { return ""; }
};
class bad_exception : public exception {
 public:
  bad_exception() noexcept {}
};
class bad_alloc : public exception {
 public:
  bad_alloc() noexcept {}

 protected:
  bad_alloc(char const*) noexcept {}
  friend class bad_array_new_length;
};
class bad_array_new_length : public bad_alloc {
 public:
  bad_array_new_length() noexcept {}
};
}  // namespace std
