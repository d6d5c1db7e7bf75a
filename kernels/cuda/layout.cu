// Moving elements to other places. Elements are bits of 1, 2, 4 or 8 bytes here.
#include "common.cuh"

// Up to four dimensions, the last one innermost; strides in elements.
struct Strided { u64 extents[4], strides[4]; };

// Where element i of the dense side lies on the strided one. Division of 64 bits is slow, so it is done only where needed.
template <class N> DEVICE u64 place(const Strided &s, u64 index) {
    N i = (N)index;
    u64 at = 0;
#pragma unroll
    for (int d = 3; d > 0; d--) {
        N extent = (N)s.extents[d], rest = i / extent;
        at += (u64)(i - rest * extent) * s.strides[d];
        i = rest;
    }
    return at + (u64)i * s.strides[0];
}

template <class N, class T, bool GATHER>
DEVICE void move_strided(T *to, const T *from, const Strided &s, u64 n) {
    u64 i = thread_index(), step = thread_count();
#pragma unroll 4
    for (u64 k = i; k < n; k += step) {
        u64 at = place<N>(s, k);
        if (GATHER) to[k] = from[at];
        else to[at] = from[k];
    }
}

template <class T, bool GATHER> DEVICE void strided(T *__restrict__ to, const T *__restrict__ from, const Strided &s) {
    u64 n = s.extents[0] * s.extents[1] * s.extents[2] * s.extents[3];
    if (n >> 32 == 0) move_strided<u32, T, GATHER>(to, from, s, n);
    else move_strided<u64, T, GATHER>(to, from, s, n);
}

#define STRIDED(NAME, T, GATHER)                                                                                          \
    KERNEL NAME(T *to, const T *from, u64 e0, u64 e1, u64 e2, u64 e3, u64 s0, u64 s1, u64 s2, u64 s3) {                   \
        Strided s = {{e0, e1, e2, e3}, {s0, s1, s2, s3}};                                                                 \
        strided<T, GATHER>(to, from, s);                                                                                  \
    }
STRIDED(gather_8, u8, true)
STRIDED(gather_16, u16, true)
STRIDED(gather_32, u32, true)
STRIDED(gather_64, u64, true)
STRIDED(scatter_8, u8, false)
STRIDED(scatter_16, u16, false)
STRIDED(scatter_32, u32, false)
STRIDED(scatter_64, u64, false)
