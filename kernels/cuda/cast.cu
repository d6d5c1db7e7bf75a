// Conversion between dtypes, element by element.
//
// To a float: the nearest value, ties to even, rounded once; too large becomes infinite; every NaN becomes the canonical one.
// From a float to an integer: towards zero, held within the integer's range; NaN becomes 0. Integers to integers wrap.
#include "common.cuh"

// Signed or unsigned, 32 bits or 64: the types that conversion instructions know. u8 goes through i32.
template <class T> struct Integer;
template <> struct Integer<u8> {
    DEVICE f32 to_f32(u8 x) { return (f32)x; }
    DEVICE f32 to_f32_odd(u8 x) { return (f32)x; }
    DEVICE f64 to_f64(u8 x) { return (f64)x; }
    DEVICE u8 hold(i32 x) { return (u8)(x < 0 ? 0 : x > 255 ? 255 : x); }
    DEVICE u8 from(f32 x) { return hold(__float2int_rz(x)); }
    DEVICE u8 from(f64 x) { return hold(__double2int_rz(x)); }
};
// Rounded to odd: truncated, and the last bit set where that lost something. What is then rounded to fewer bits by two or more
// is as if it had been rounded once.
DEVICE f32 odd(f32 truncated, bool exact) {
    return exact ? truncated : __uint_as_float(__float_as_uint(truncated) | 1);
}
#define INTEGER(T, TO_F32, TO_F32_RZ, TO_F64, FROM_F32, FROM_F64)                                 \
    template <> struct Integer<T> {                                                              \
        DEVICE f32 to_f32(T x) { return TO_F32(x); }                                             \
        DEVICE f32 to_f32_odd(T x) { f32 y = TO_F32_RZ(x); return odd(y, FROM_F32(y) == x); }    \
        DEVICE f64 to_f64(T x) { return TO_F64(x); }                                             \
        DEVICE T from(f32 x) { return FROM_F32(x); }                                             \
        DEVICE T from(f64 x) { return FROM_F64(x); }                                             \
    };
INTEGER(i32, __int2float_rn, __int2float_rz, __int2double_rn, __float2int_rz, __double2int_rz)
INTEGER(u32, __uint2float_rn, __uint2float_rz, __uint2double_rn, __float2uint_rz, __double2uint_rz)
INTEGER(i64, __ll2float_rn, __ll2float_rz, __ll2double_rn, __float2ll_rz, __double2ll_rz)
INTEGER(u64, __ull2float_rn, __ull2float_rz, __ull2double_rn, __float2ull_rz, __double2ull_rz)

DEVICE f64 real(f64 x) { return x; }
template <class T> DEVICE f32 real(T x) { return widen(x); }

// A float as a float of another type.
template <class D> struct ToFloat;
template <> struct ToFloat<f32> {
    DEVICE f32 of(f32 x) { return x != x ? __uint_as_float(0x7FC00000) : x; }
    DEVICE f32 of(f64 x) { return of(__double2float_rn(x)); }
    template <class S> DEVICE f32 of_integer(S x) { return Integer<S>::to_f32(x); }
};
template <> struct ToFloat<f64> {
    DEVICE f64 of(f64 x) { return x != x ? __longlong_as_double(0x7FF8000000000000LL) : x; }
    DEVICE f64 of(f32 x) { return of((f64)x); }
    template <class S> DEVICE f64 of_integer(S x) { return Integer<S>::to_f64(x); }
};
template <> struct ToFloat<f16> {
    DEVICE f16 of(f32 x) { return narrow<f16>(x); }
    DEVICE f16 of(f64 x) {
        f16 y;
        asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x));
        if (x != x) y.bits = 0x7E00;
        return y;
    }
    // What f32 does not hold exactly is too large for f16 anyway.
    template <class S> DEVICE f16 of_integer(S x) { return narrow<f16>(Integer<S>::to_f32(x)); }
};
template <> struct ToFloat<bf16> {
    DEVICE bf16 of(f32 x) { return narrow<bf16>(x); }
    DEVICE bf16 of(f64 x) {
        f32 y = __double2float_rz(x);
        return narrow<bf16>(odd(y, x != x || (f64)y == x));
    }
    template <class S> DEVICE bf16 of_integer(S x) { return narrow<bf16>(Integer<S>::to_f32_odd(x)); }
};

// Which of the four kinds of conversion it is.
template <class T> struct IsFloat { static const bool value = false; };
template <> struct IsFloat<f16> { static const bool value = true; };
template <> struct IsFloat<bf16> { static const bool value = true; };
template <> struct IsFloat<f32> { static const bool value = true; };
template <> struct IsFloat<f64> { static const bool value = true; };

template <class S, class D, bool FROM_FLOAT, bool TO_FLOAT> struct Convert;
template <class S, class D> struct Convert<S, D, false, false> { DEVICE D of(S x) { return (D)x; } };
template <class S, class D> struct Convert<S, D, false, true> {
    DEVICE D of(S x) { return ToFloat<D>::of_integer(x); }
};
template <class S, class D> struct Convert<S, D, true, false> {
    DEVICE D of(S s) {
        auto x = real(s);
        return x != x ? (D)0 : Integer<D>::from(x);
    }
};
template <class S, class D> struct Convert<S, D, true, true> { DEVICE D of(S x) { return ToFloat<D>::of(real(x)); } };

// As many elements as fill 16 bytes of the larger type; 4 if that is of 8 bytes and the other is not.
template <class S, class D> struct Width {
    static const int larger = sizeof(S) > sizeof(D) ? sizeof(S) : sizeof(D);
    static const int smaller = sizeof(S) > sizeof(D) ? sizeof(D) : sizeof(S);
    static const int value = larger == 8 && smaller < 8 ? 4 : 16 / larger;
};

template <class S, class D> DEVICE void cast(D *to, const S *from, u64 n) {
    typedef Convert<S, D, IsFloat<S>::value, IsFloat<D>::value> C;
    const int V = Width<S, D>::value;
    u64 i = thread_index(), step = thread_count(), done = 0;
    if (fits<S, V>(from) && fits<D, V>(to)) {
        u64 vectors = n / V;
        for (u64 k = i; k < vectors; k += step) {
            Pack<S, V> s;
            Pack<D, V> d;
            load(s.words, from + V * k);
            d.clear();
#pragma unroll
            for (int e = 0; e < V; e++) d.put(e, C::of(s.get(e)));
            store(to + V * k, d.words);
        }
        done = vectors * V;
    }
    for (u64 k = done + i; k < n; k += step) to[k] = C::of(from[k]);
}

#define CAST(S, D) \
    KERNEL cast_##S##_##D(D *to, const S *from, u64 n) { cast(to, from, n); }
// Integers to integers need no kernel for each sign: low bits are the same for both.
CAST(u8, u32) CAST(u8, u64) CAST(i32, u64) CAST(u32, u8) CAST(u32, u64) CAST(u64, u8) CAST(u64, u32)
CAST(u8, f16) CAST(u8, bf16) CAST(u8, f32) CAST(u8, f64)
CAST(i32, f16) CAST(i32, bf16) CAST(i32, f32) CAST(i32, f64)
CAST(u32, f16) CAST(u32, bf16) CAST(u32, f32) CAST(u32, f64)
CAST(i64, f16) CAST(i64, bf16) CAST(i64, f32) CAST(i64, f64)
CAST(u64, f16) CAST(u64, bf16) CAST(u64, f32) CAST(u64, f64)
CAST(f16, u8) CAST(f16, i32) CAST(f16, u32) CAST(f16, i64) CAST(f16, u64) CAST(f16, bf16) CAST(f16, f32) CAST(f16, f64)
CAST(bf16, u8) CAST(bf16, i32) CAST(bf16, u32) CAST(bf16, i64) CAST(bf16, u64) CAST(bf16, f16) CAST(bf16, f32) CAST(bf16, f64)
CAST(f32, u8) CAST(f32, i32) CAST(f32, u32) CAST(f32, i64) CAST(f32, u64) CAST(f32, f16) CAST(f32, bf16) CAST(f32, f64)
CAST(f64, u8) CAST(f64, i32) CAST(f64, u32) CAST(f64, i64) CAST(f64, u64) CAST(f64, f16) CAST(f64, bf16) CAST(f64, f32)
