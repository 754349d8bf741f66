// Declarations only, for syntax checks: what libc++ expects of Microsoft's header of this name.
#pragma once
#ifndef _VCRTIMP
#define _VCRTIMP
#endif
#include <corecrt.h>
#include <vadefs.h>
