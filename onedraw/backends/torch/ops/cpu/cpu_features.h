/* The sources are compiled once per instruction set (avx512, avx2, portable) into one library; exported names end with that of
 * the set. The set is chosen at run time (cpu_features.c). Bits are equal within an instruction set, but not between them. */

#ifndef ONEDRAW_CPU_FEATURES_H
#define ONEDRAW_CPU_FEATURES_H

#ifndef ONEDRAW_ISA
#define ONEDRAW_ISA portable
#endif
#define ONEDRAW_JOIN2(a, b) a##_##b
#define ONEDRAW_JOIN(a, b) ONEDRAW_JOIN2(a, b)
#define EXPORT(name) __attribute__((visibility("default"))) ONEDRAW_JOIN(name, ONEDRAW_ISA)
#define INTERNAL(name) ONEDRAW_JOIN(name, ONEDRAW_ISA)
#define INLINE static inline __attribute__((always_inline))

#endif
