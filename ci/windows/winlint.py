"""Lint for C++ that MSVC refuses and gcc accepts. Usage: winlint.py FILE... ; a line with `winlint: ok` is left out."""

import pathlib
import re
import sys

RULES = [
    (
        "altok",
        r'(?<![\w.>"\'])(?:and|or|not|xor|bitand|bitor|compl|and_eq|or_eq|xor_eq|not_eq)(?=\s*[\w(!~&*:])',
        "alternative token (MSVC without /permissive- : C2065)",
    ),
    ("attribute", r"__attribute__\s*\(\(", "GNU attribute"),
    ("builtin", r"\b__builtin_\w+", "GCC builtin"),
    ("int128", r"\b(?:unsigned\s+)?__int128\b", "128-bit int"),
    ("asm", r"\b(?:__asm__|asm)\s*(?:__volatile__|volatile)?\s*\(", "inline asm"),
    ("ssize_t", r"(?<!Py_)\bssize_t\b", "ssize_t"),
    ("bsdint", r"\b(?:u_int(?:8|16|32|64)_t|uint|ulong|ushort|u_char|u_long)\b", "BSD integer alias"),
    ("long", r"(?<![\w])(?:unsigned\s+)?long(?!\s+(?:long|double)|\w)", "bare long (32 bits on Windows)"),
    ("lsuffix", r"\b\d[\d\']*[uU]?[lL](?![lL\w])", "1L / 1UL literal"),
    ("fmtl", r'"[^"\n]*%[-+ #0-9.*]*l[dux](?![\w])[^"\n]*"', "%ld / %lu"),
    (
        "posixhdr",
        r"^\s*#\s*include\s*<(?:unistd|pthread|sched|dlfcn|dirent|strings|sys/\w+|alloca|cxxabi|execinfo|linux/.*|numa|immintrin_gcc|x86intrin)\.?h?>",
        "POSIX header",
    ),
    (
        "posixfn",
        r"\b(?:pthread_\w+|posix_memalign|aligned_alloc|mlock|munlock|mmap|munmap|madvise|sysconf|getpagesize|usleep|nanosleep|clock_gettime|gettimeofday|localtime_r|strerror_r|strtok_r|sched_\w+|fork|setenv|unsetenv|dlopen|dlsym|bzero|strcasecmp|M_PI)\b",
        "POSIX function",
    ),
    ("winhdr", r"^\s*#\s*include\s*<[wW]indows\.h>", "windows.h (needs NOMINMAX and WIN32_LEAN_AND_MEAN before it)"),
    ("stmtexpr", r"(?<!\w)\(\{", "possible statement expression"),
    ("pragma", r'#\s*pragma\s+(?:GCC|clang)|_Pragma\s*\(\s*"(?:GCC|clang)', "GCC/clang pragma outside a guard"),
    (
        "ompsizet",
        r"#\s*pragma\s+omp[^\n]*for[^\n]*\n\s*for\s*\(\s*(?:std::)?(?:size_t|uint\w*|unsigned)",
        "unsigned OpenMP index (MSVC /openmp 2.0: C3016)",
    ),
    ("signals", r"\bsigaction\b|\bSIG(?:USR1|USR2|ALRM|CHLD|HUP|KILL)\b", "POSIX signals"),
    ("weak", r"\b__(?:thread|restrict__|restrict|typeof__|extension__)\b|\btypeof\b", "GNU keyword"),
]


def without_comments(text):
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.S)


def without_strings(text):
    return re.sub(r'"(?:[^"\\\n]|\\.)*"', lambda string: '"' + "_" * (len(string[0]) - 2) + '"', text)


def findings(path):
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    code = without_comments(text)
    bare_code = without_strings(code)
    for name, pattern, reason in RULES:
        searched = code if name in ("fmtl", "posixhdr", "winhdr") else bare_code
        for match in re.finditer(pattern, searched, re.M):
            line = searched.count("\n", 0, match.start())
            if "winlint: ok" not in lines[line]:
                yield f"{path}:{line + 1}: [{name}] {reason}: {match[0].strip()[:50]!r}"


found = [finding for path in sys.argv[1:] for finding in findings(pathlib.Path(path))]
print(*found, sep="\n", end="\n" if found else "")
sys.exit(bool(found))
