"""Lint for C++ that MSVC refuses and gcc accepts. Usage: winlint.py FILE... ; a line with `winlint: ok` is left out."""

import pathlib
import re
import sys

RULES = [
    (
        "altok",
        r'(?<![\w.>"\'])(?:and|or|not|xor|bitand|bitor|compl|and_eq|or_eq|xor_eq|not_eq)(?!\w)(?=\s*[\w(!~&*:])',
        "alternative token (MSVC without /permissive- : C2065)",
    ),
    ("attribute", r"__attribute__\s*\(\(", "GNU attribute"),
    ("builtin", r"\b__builtin_\w+", "GCC builtin"),
    ("int128", r"\b(?:unsigned\s+)?__int128\b", "128-bit int"),
    ("asm", r"\b(?:__asm__|asm)\s*(?:__volatile__|volatile)?\s*\(", "inline asm"),
    ("ssize_t", r"(?<!Py_)\bssize_t\b", "ssize_t"),
    ("bsdint", r"\b(?:u_int(?:8|16|32|64)_t|uint|ulong|ushort|u_char|u_long)\b", "BSD integer alias"),
    ("long", r"(?<!\w)(?<!long )long(?!\s+(?:long|double)|\w)", "bare long (32 bits on Windows)"),
    ("lsuffix", r"\b(?:0[xX][\da-fA-F\']+|\d[\d\']*)(?:[uU][lL]|[lL][uU]?)(?!\w)", "1L / 1UL literal"),
    (
        "longfn",
        r"\b(?:stou?l|(?:str|wcs)tou?l|atol|labs|ldiv|l(?:round|rint)[fl]?|atomic_u?long)\b",
        "function or type of long (32 bits on Windows)",
    ),
    ("fmtl", r'"[^"\n]*%[-+ #0-9.*]*l[dux](?![\w])[^"\n]*"', "%ld / %lu"),
    (
        "posixhdr",
        r'^\s*#\s*include\s*[<"](?:(?:unistd|pthread|sched|dlfcn|dirent|strings|alloca|cxxabi|execinfo|numa|numaif|x86intrin|'
        r"getopt|libgen|semaphore|poll|netdb|ftw|glob|fcntl|termios|pwd|grp|syslog|spawn|regex|aio)\.h|"
        r"(?:sys|linux|arpa|net|netinet|asm)/)",
        "POSIX header",
    ),
    (
        "posixfn",
        r"\b(?:pthread_\w+|posix_\w+|aligned_alloc|mlock|munlock|mmap|munmap|madvise|sysconf|getpagesize|usleep|nanosleep|"
        r"clock_gettime|gettimeofday|localtime_r|gmtime_r|timegm|strerror_r|strtok_r|rand_r|sched_\w+|fork|execv\w*|waitpid|"
        r"getpid|gettid|setenv|unsetenv|dlopen|dlsym|bzero|strcasecmp|strncasecmp|strsep|strndup|fseeko|ftello|mkstemp|"
        r"mkdtemp|popen|pclose|fileno|isatty|realpath|M_PI)\b",
        "POSIX function",
    ),
    ("posixtype", r"\b(?:pid_t|mode_t|uid_t|gid_t|off64_t|useconds_t|suseconds_t|pthread_t|sem_t)\b", "POSIX type"),
    (
        "winhdr",
        r'^\s*#\s*include\s*[<"][wW]indows\.h[>"]',
        "windows.h (needs NOMINMAX and WIN32_LEAN_AND_MEAN before it)",
    ),
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


WITHIN_STRINGS = {"fmtl", "posixhdr", "winhdr", "pragma"}

# One expression for both, read from the start: a comment may hold quotes, and a string slashes. An apostrophe inside a
# number begins neither.
COMMENT_OR_LITERAL = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)"
    r'|(?<!\w)(?:u8|[uUL])?R"(?P<end>[^()\\\s]*)\(.*?\)(?P=end)"'
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|(?<!\w)(?:u8|[uUL])?'(?:[^'\\\n]|\\.)+'",
    re.S,
)


def code_of(text, strings):
    """The text without its comments and, unless ``strings``, with blanks for what is quoted; line by line the same."""

    def replaced(match):
        if match["comment"] is None and strings:
            return match[0]
        return re.sub(r"[^\n]", " " if match["comment"] else "_", match[0])

    return COMMENT_OR_LITERAL.sub(replaced, text)


def findings(path):
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    whole, bare = code_of(text, strings=True), code_of(text, strings=False)
    for name, pattern, reason in RULES:
        for match in re.finditer(pattern, whole if name in WITHIN_STRINGS else bare, re.M):
            line = text.count("\n", 0, match.start())
            if "winlint: ok" not in lines[line]:
                yield f"{path}:{line + 1}: [{name}] {reason}: {match[0].strip()[:50]!r}"


if len(sys.argv) == 1:
    sys.exit("winlint: no file given")
found = [finding for path in sys.argv[1:] for finding in findings(pathlib.Path(path))]
print(*found, sep="\n", end="\n" if found else "")
sys.exit(bool(found))
