// What the kernels share. No header of the toolkit is needed.
//
// Conventions: lengths and indices have 64 bits; threads take a piece each and go on by the size of the grid; memory is moved in
// vectors of 16 bytes where addresses allow, else element by element. Conversions and sums are the host implementation's.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void

DEVICE u64 thread_index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE u64 thread_count() { return (u64)gridDim.x * blockDim.x; }
DEVICE bool is_aligned(const void *p, u64 bytes) { return ((u64)p & (bytes - 1)) == 0; }

// The output function of splitmix64: a bijection of 64 bits that spreads any difference over all of them.
DEVICE u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}
#define GAMMA 0x9E3779B97F4A7C15ULL

DEVICE f32 widen(f32 x) { return x; }
DEVICE f64 widen(f64 x) { return x; }
DEVICE f32 widen(f16 x) {
    f32 y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE f32 widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// To the nearest value, ties to even, as narrow<T>(x). NaN becomes the canonical one.
template <class T> struct Narrow;
template <> struct Narrow<f32> { DEVICE f32 of(f32 x) { return x; } };
template <> struct Narrow<f64> { DEVICE f64 of(f64 x) { return x; } };
template <> struct Narrow<f16> {
    DEVICE f16 of(f32 x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        if (x != x) y.bits = 0x7E00;
        return y;
    }
};
template <> struct Narrow<bf16> {
    // Conversion instructions exist from sm_80 on only; adding to the bits is the same and no slower, as memory bounds it.
    DEVICE bf16 of(f32 x) {
        u32 bits = __float_as_uint(x);
        bf16 y;
        y.bits = (u16)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
        if (x != x) y.bits = 0x7FC0;
        return y;
    }
};
template <class T, class X> DEVICE T narrow(X x) { return Narrow<T>::of(x); }

// 4 to 32 bytes in registers, as words; loaded and stored with the widest instructions there are.
template <int BYTES> struct Words { u32 w[BYTES / 4]; };

DEVICE void load(Words<4> &v, const void *p) { v.w[0] = *(const u32 *)p; }
DEVICE void load(Words<8> &v, const void *p) {
    uint2 q = *(const uint2 *)p;
    v.w[0] = q.x, v.w[1] = q.y;
}
DEVICE void load(Words<16> &v, const void *p) {
    uint4 q = *(const uint4 *)p;
    v.w[0] = q.x, v.w[1] = q.y, v.w[2] = q.z, v.w[3] = q.w;
}
DEVICE void load(Words<32> &v, const void *p) {
    uint4 q = ((const uint4 *)p)[0], r = ((const uint4 *)p)[1];
    v.w[0] = q.x, v.w[1] = q.y, v.w[2] = q.z, v.w[3] = q.w, v.w[4] = r.x, v.w[5] = r.y, v.w[6] = r.z, v.w[7] = r.w;
}
DEVICE void store(void *p, const Words<4> &v) { *(u32 *)p = v.w[0]; }
DEVICE void store(void *p, const Words<8> &v) { *(uint2 *)p = make_uint2(v.w[0], v.w[1]); }
DEVICE void store(void *p, const Words<16> &v) { *(uint4 *)p = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]); }
DEVICE void store(void *p, const Words<32> &v) {
    ((uint4 *)p)[0] = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
    ((uint4 *)p)[1] = make_uint4(v.w[4], v.w[5], v.w[6], v.w[7]);
}

// Elements by their bits, in and out of words.
template <int SIZE> struct Bits;
template <> struct Bits<1> {
    typedef u8 Type;
    DEVICE u8 get(const u32 *w, int i) { return (u8)(w[i / 4] >> (8 * (i % 4))); }
    DEVICE void put(u32 *w, int i, u8 x) { w[i / 4] |= (u32)x << (8 * (i % 4)); }
};
template <> struct Bits<2> {
    typedef u16 Type;
    DEVICE u16 get(const u32 *w, int i) { return (u16)(w[i / 2] >> (16 * (i % 2))); }
    DEVICE void put(u32 *w, int i, u16 x) { w[i / 2] |= (u32)x << (16 * (i % 2)); }
};
template <> struct Bits<4> {
    typedef u32 Type;
    DEVICE u32 get(const u32 *w, int i) { return w[i]; }
    DEVICE void put(u32 *w, int i, u32 x) { w[i] = x; }
};
template <> struct Bits<8> {
    typedef u64 Type;
    DEVICE u64 get(const u32 *w, int i) { return (u64)w[2 * i] | (u64)w[2 * i + 1] << 32; }
    DEVICE void put(u32 *w, int i, u64 x) { w[2 * i] = (u32)x, w[2 * i + 1] = (u32)(x >> 32); }
};
DEVICE u8 to_bits(u8 x) { return x; }
DEVICE u32 to_bits(i32 x) { return (u32)x; }
DEVICE u32 to_bits(u32 x) { return x; }
DEVICE u64 to_bits(i64 x) { return (u64)x; }
DEVICE u64 to_bits(u64 x) { return x; }
DEVICE u16 to_bits(f16 x) { return x.bits; }
DEVICE u16 to_bits(bf16 x) { return x.bits; }
DEVICE u32 to_bits(f32 x) { return __float_as_uint(x); }
DEVICE u64 to_bits(f64 x) { return (u64)__double_as_longlong(x); }
template <class T> struct FromBits;
template <> struct FromBits<u8> { DEVICE u8 of(u8 b) { return b; } };
template <> struct FromBits<i32> { DEVICE i32 of(u32 b) { return (i32)b; } };
template <> struct FromBits<u32> { DEVICE u32 of(u32 b) { return b; } };
template <> struct FromBits<i64> { DEVICE i64 of(u64 b) { return (i64)b; } };
template <> struct FromBits<u64> { DEVICE u64 of(u64 b) { return b; } };
template <> struct FromBits<f16> { DEVICE f16 of(u16 b) { f16 x = {b}; return x; } };
template <> struct FromBits<bf16> { DEVICE bf16 of(u16 b) { bf16 x = {b}; return x; } };
template <> struct FromBits<f32> { DEVICE f32 of(u32 b) { return __uint_as_float(b); } };
template <> struct FromBits<f64> { DEVICE f64 of(u64 b) { return __longlong_as_double((i64)b); } };

// V elements of T in registers.
template <class T, int V> struct Pack {
    Words<V * sizeof(T)> words;
    DEVICE u64 bytes() { return V * sizeof(T); }
    __device__ __forceinline__ T get(int i) const { return FromBits<T>::of(Bits<sizeof(T)>::get(words.w, i)); }
    __device__ __forceinline__ void put(int i, T x) { Bits<sizeof(T)>::put(words.w, i, to_bits(x)); }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < (int)(V * sizeof(T) / 4); i++) words.w[i] = 0;
    }
};
// Vectors of more than 16 bytes are loaded in two, so 16 is all the alignment that is needed.
template <class T, int V> DEVICE bool fits(const T *p) { return is_aligned(p, V * sizeof(T) < 16 ? V * sizeof(T) : 16); }
