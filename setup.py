"""Builds gpuprefetch._C. The metadata is in pyproject.toml, the search for torch in build_backend/."""

import os
import shlex
import shutil
import sys
import sysconfig
from glob import glob

from setuptools import setup
from setuptools.errors import PlatformError

NO_COMPILER = "gpuprefetch is compiled on installation, and no C++ compiler was found: "
NO_CXX = NO_COMPILER + '"{}" is not there; install g++ or clang++ (Debian and Ubuntu: apt install g++), or set CXX.'
NO_MSVC = NO_COMPILER + (
    'install the Visual Studio Build Tools with the component "Desktop development with C++" by\n'
    '    winget install Microsoft.VisualStudio.2022.BuildTools --override "--wait --passive '
    '--add Microsoft.VisualStudio.Workload.VCTools --includeRecommended"\n'
    "and repeat the command in a new prompt."
)
OTHER_PROMPT = (
    "this Visual C++ prompt makes programs for {}, and PyTorch is one for x64: repeat the command in an ordinary "
    'prompt or in the "x64 Native Tools Command Prompt".'
)
PROMPT_WITHOUT_SDK = (
    "in a Visual C++ prompt its compiler is used only where DISTUTILS_USE_SDK says so: repeat the command after\n"
    "    set DISTUTILS_USE_SDK=1\n"
    "or, in PowerShell, $env:DISTUTILS_USE_SDK = 1"
)

if sys.platform == "win32":
    COMPILE_ARGS = ["/permissive-", "/Zc:preprocessor", "/Zc:__cplusplus", "/utf-8", "/bigobj", "/EHsc", "/O2"]
    # Without it std::mutex crashes at the first lock where an older msvcp140.dll is loaded (microsoft/STL#4978).
    MACROS = [("_DISABLE_CONSTEXPR_MUTEX_CONSTRUCTOR", None)]
else:
    # -g0: many a Python passes its own -g on, with which torch's headers compile slowly into a large module.
    COMPILE_ARGS = ["-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
    MACROS = []


def require_compiler(compiler):
    """End with one sentence where the compiler (distutils' object for it) can't run."""
    if sys.platform == "win32":
        prompt = os.environ.get("VSCMD_ARG_TGT_ARCH", "x64")  # set by a Visual C++ prompt
        if prompt != "x64":
            raise SystemExit(OTHER_PROMPT.format(prompt))
        # Without that variable torch would end with a traceback.
        if "VSCMD_ARG_TGT_ARCH" in os.environ and "DISTUTILS_USE_SDK" not in os.environ:
            raise SystemExit(PROMPT_WITHOUT_SDK)
        try:
            if not compiler.initialized:
                compiler.initialize()
        except PlatformError:
            raise SystemExit(NO_MSVC) from None
        if shutil.which(compiler.cc) is None:
            raise SystemExit(NO_MSVC)
        return
    # torch compiles with the first, distutils links with the second.
    for command in (os.environ.get("CXX", "c++"), compiler.compiler_cxx[0]):
        if shutil.which(shlex.split(command)[0]) is None:
            raise SystemExit(NO_CXX.format(command))


def compiled_part():
    """The arguments of setup() that need torch. No -std: torch adds the one that its headers want."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class BuildExt(BuildExtension):
        def build_extensions(self):
            require_compiler(self.compiler)
            super().build_extensions()

    # ninja lies beside the interpreter, which is not on the path where the environment was not activated.
    os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")
    # Relative sources and a flat folder keep the objects' paths short (260 characters on Windows). Each torch has its
    # own: installers may give its headers old time stamps, and objects of another torch would pass for up to date.
    objects = f"build/{sys.implementation.cache_tag}-torch{torch.__version__}".replace("+", "-")
    sources = sorted(glob("csrc/*.cpp"))
    return {
        "ext_modules": [CppExtension("gpuprefetch._C", sources, define_macros=MACROS, extra_compile_args=COMPILE_ARGS)],
        "cmdclass": {"build_ext": BuildExt},
        "options": {"build": {"build_temp": objects}},
    }


if __name__ == "__main__":
    # Metadata and the sdist need no torch.
    setup(**({} if {"dist_info", "egg_info", "sdist"} & set(sys.argv) else compiled_part()))
