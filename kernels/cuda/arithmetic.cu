// Arithmetic, element by element.
#include "common.cuh"

// Vectors of V elements are processed two at a time, all loads before all stores; so an output may be an input, and many loads
// are in flight.
template <class T, class F> DEVICE void binary(T *out, const T *a, const T *b, u64 n, F f) {
    const int V = 16 / sizeof(T);
    u64 i = thread_index(), step = thread_count(), done = 0;
    if (fits<T, V>(out) && fits<T, V>(a) && fits<T, V>(b)) {
        u64 vectors = n / V, k = i;
        for (; k < vectors && step < vectors - k; k += 2 * step) {
            Pack<T, V> a0, b0, a1, b1, c0, c1;
            load(a0.words, a + V * k), load(b0.words, b + V * k);
            load(a1.words, a + V * (k + step)), load(b1.words, b + V * (k + step));
            c0.clear(), c1.clear();
#pragma unroll
            for (int e = 0; e < V; e++) c0.put(e, f(a0.get(e), b0.get(e))), c1.put(e, f(a1.get(e), b1.get(e)));
            store(out + V * k, c0.words), store(out + V * (k + step), c1.words);
        }
        if (k < vectors) {
            Pack<T, V> a0, b0, c0;
            load(a0.words, a + V * k), load(b0.words, b + V * k);
            c0.clear();
#pragma unroll
            for (int e = 0; e < V; e++) c0.put(e, f(a0.get(e), b0.get(e)));
            store(out + V * k, c0.words);
        }
        done = vectors * V;
    }
    for (u64 k = done + i; k < n; k += step) out[k] = f(a[k], b[k]);
}

// Integers wrap. f16 and bf16 are added as f32 and rounded once.
template <class T> struct Add {
    __device__ __forceinline__ T operator()(T a, T b) const { return narrow<T>(widen(a) + widen(b)); }
};
template <> struct Add<u8> {
    __device__ __forceinline__ u8 operator()(u8 a, u8 b) const { return (u8)(a + b); }
};
template <> struct Add<u32> {
    __device__ __forceinline__ u32 operator()(u32 a, u32 b) const { return a + b; }
};
template <> struct Add<u64> {
    __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a + b; }
};

#define ADD(T) \
    KERNEL add_##T(T *out, const T *a, const T *b, u64 n) { binary(out, a, b, n, Add<T>()); }
ADD(u8)
ADD(u32)
ADD(u64)
ADD(f16)
ADD(bf16)
ADD(f32)
ADD(f64)

// y = a * x + y, rounded once in the type of a, and then to T.
DEVICE f32 fma_of(f32 a, f32 x, f32 y) { return __fmaf_rn(a, x, y); }
DEVICE f64 fma_of(f64 a, f64 x, f64 y) { return __fma_rn(a, x, y); }

template <class T, class A> struct Axpy {
    A a;
    __device__ __forceinline__ T operator()(T x, T y) const { return narrow<T>(fma_of(a, widen(x), widen(y))); }
};

#define AXPY(NAME, T, A)                                      \
    KERNEL axpy_##NAME(T *y, const T *x, A a, u64 n) {        \
        Axpy<T, A> f = {a};                                   \
        binary(y, x, y, n, f);                                \
    }
AXPY(f16, f16, f32)
AXPY(bf16, bf16, f32)
AXPY(f32, f32, f32)
AXPY(f64, f64, f64)
