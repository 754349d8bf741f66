// Before every file that includes torch, for syntax checks only: lets the headers of torch's Windows wheel parse for a
// Windows target with the GNU ABI.
#include <cassert>
extern "C" [[noreturn]] void __assert_fail(const char*, const char*, unsigned, const char*) noexcept;
#include <c10/macros/Export.h>
#undef C10_IMPORT
#define C10_IMPORT
#undef C10_API
#define C10_API
