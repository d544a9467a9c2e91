/* Whether this processor supports one of the instruction sets that the kernels were compiled for, by its name `path`. */

#include <string.h>

__attribute__((visibility("default"))) int onedraw_supports(const char *path) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (!strcmp(path, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    if (!strcmp(path, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    return !strcmp(path, "portable");
}
