// Declarations only, for syntax checks: what libc++ expects of Microsoft's header of this name.
#pragma once
#include <vcruntime_new.h>
