// Stands before every file that is checked for the MSVC target: what the MinGW headers lack or spell another way.
#pragma clang system_header
#include <_mingw.h>
#undef __MINGW_IMPORT
#define __MINGW_IMPORT extern
#include <corecrt.h>
#include <locale.h>
extern "C" {  // as newer headers declare them
float __cdecl _strtof_l(const char* __restrict__, char** __restrict__, _locale_t);
long double __cdecl _strtold_l(const char* __restrict__, char** __restrict__, _locale_t);
}
#include_next <math.h>
#undef isnan
#undef isinf
#undef isfinite
#undef isnormal
#undef signbit
#undef fpclassify
template <class A>
bool isnan(A) noexcept;
template <class A>
bool isinf(A) noexcept;
template <class A>
bool isfinite(A) noexcept;
template <class A>
bool isnormal(A) noexcept;
template <class A>
bool signbit(A) noexcept;
template <class A>
int fpclassify(A) noexcept;
#ifndef _PID_T_
#define _PID_T_
typedef int _pid_t;
typedef int pid_t;
#endif
#define _INC_SETJMP
#include <crtdefs.h>
typedef long long jmp_buf[32];
extern "C" int __cdecl _setjmp(jmp_buf);
