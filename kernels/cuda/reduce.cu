// Sums in a fixed order, so that the same elements give the same bits on every device.
//
// Pass 1 (reduce_sum_*): G blocks of 256 threads, G being the size of the grid; thread g of all takes the vectors of 16 bytes g,
// g + 256 G, ..., and adds element e of each to accumulator e mod 4, the elements after the last whole vector likewise. A thread's
// value is (a0 + a1) + (a2 + a3); a block's is the tree v[t] += v[t + s] for s = 128, 64, ..., 1.
// Pass 2 (reduce_finish_*): one block; thread t adds the blocks' values t, t + 256, ..., then the same tree.
// Floats are accumulated as f64 and rounded once at the end, integers as u64, wrapping.
#include "common.cuh"

#define THREADS 256

DEVICE f64 wide(f16 x) { return (f64)widen(x); }
DEVICE f64 wide(bf16 x) { return (f64)widen(x); }
DEVICE f64 wide(f32 x) { return (f64)x; }
DEVICE f64 wide(f64 x) { return x; }
DEVICE u64 wide(u8 x) { return x; }
DEVICE u64 wide(i32 x) { return (u64)(i64)x; }
DEVICE u64 wide(u32 x) { return x; }
DEVICE u64 wide(u64 x) { return x; }

// The tree over a block's values; the result is thread 0's.
template <class A> DEVICE A tree(A value) {
    __shared__ A values[THREADS];
    u32 t = threadIdx.x;
    values[t] = value;
    for (u32 s = THREADS / 2; s >= 32; s /= 2) {
        __syncthreads();
        if (t < s) values[t] = value = value + values[t + s];
    }
    for (u32 s = 16; s > 0; s /= 2) value = value + __shfl_down_sync(0xFFFFFFFF, value, s);
    return value;
}

template <class T, class A, int V> DEVICE void add(A *acc, const Pack<T, V> &pack) {
#pragma unroll
    for (int e = 0; e < V; e++) acc[e % 4] = acc[e % 4] + wide(pack.get(e));
}

// One vector, from wherever it lies.
template <class T, int V> DEVICE void fetch(Pack<T, V> &pack, const T *from, bool aligned) {
    if (aligned) {
        load(pack.words, from);
    } else {
        pack.clear();
#pragma unroll
        for (int e = 0; e < V; e++) pack.put(e, from[e]);
    }
}

template <class T, class A> DEVICE void sum(const T *from, u64 n, A *partial) {
    const int V = 16 / sizeof(T);
    u64 step = thread_count(), vectors = n / V, k = thread_index();
    bool aligned = fits<T, V>(from);
    A acc[4] = {0, 0, 0, 0};
    for (; k < vectors && 3 * step < vectors - k; k += 4 * step) {
        Pack<T, V> p0, p1, p2, p3;
        fetch(p0, from + V * k, aligned), fetch(p1, from + V * (k + step), aligned);
        fetch(p2, from + V * (k + 2 * step), aligned), fetch(p3, from + V * (k + 3 * step), aligned);
        add(acc, p0), add(acc, p1), add(acc, p2), add(acc, p3);
    }
    for (; k < vectors; k += step) {
        Pack<T, V> p;
        fetch(p, from + V * k, aligned);
        add(acc, p);
    }
    // The thread whose turn the next vector would be takes what is left of it.
    if (k == vectors) {
        u64 left = n - V * vectors;
        for (u64 e = 0; e < left; e++) {
            A x = wide(from[V * vectors + e]);
            // No indexing by a variable: the accumulators stay in registers.
            if (e % 4 == 0) acc[0] = acc[0] + x;
            if (e % 4 == 1) acc[1] = acc[1] + x;
            if (e % 4 == 2) acc[2] = acc[2] + x;
            if (e % 4 == 3) acc[3] = acc[3] + x;
        }
    }
    A value = tree((acc[0] + acc[1]) + (acc[2] + acc[3]));
    if (threadIdx.x == 0) partial[blockIdx.x] = value;
}

#define SUM(T, A) \
    KERNEL reduce_sum_##T(const T *from, u64 n, A *partial) { sum(from, n, partial); }
SUM(u8, u64)
SUM(i32, u64)
SUM(u32, u64)
SUM(u64, u64)
SUM(f16, f64)
SUM(bf16, f64)
SUM(f32, f64)
SUM(f64, f64)

template <class A> DEVICE A finish(const A *partial, u64 blocks) {
    A value = 0;
    for (u64 k = threadIdx.x; k < blocks; k += THREADS) value = value + partial[k];
    return tree(value);
}
KERNEL reduce_finish_u64(const u64 *partial, u64 blocks, u64 *to) {
    u64 value = finish(partial, blocks);
    if (threadIdx.x == 0) *to = value;
}
KERNEL reduce_finish_f64(const f64 *partial, u64 blocks, f64 *to) {
    f64 value = finish(partial, blocks);
    if (threadIdx.x == 0) *to = value;
}
KERNEL reduce_finish_f32(const f64 *partial, u64 blocks, f32 *to) {
    f64 value = finish(partial, blocks);
    if (threadIdx.x == 0) *to = __double2float_rn(value);
}
