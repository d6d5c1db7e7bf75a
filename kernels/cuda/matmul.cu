// Matrix products in tiles, accumulated as f32 in the order of k: c[i][j] = fma(a[i][k], b[k][j], c[i][j]) from 0 on.
//
// A block of 16 by 16 threads computes 64 by 64 elements, a thread 4 by 4 of them, over slices of 16 along k.
#include "common.cuh"

#define SIDE 64
#define DEPTH 16
#define EACH 4

template <class T> DEVICE void matmul(T *c, const T *a, const T *b, u64 m, u64 k, u64 n) {
    __shared__ f32 left[DEPTH][SIDE + 4], right[DEPTH][SIDE + 4];
    u32 t = threadIdx.x, x = t % 16, y = t / 16;
    u64 across = (n + SIDE - 1) / SIDE, down = (m + SIDE - 1) / SIDE;
    for (u64 block = blockIdx.x; block < across * down; block += gridDim.x) {
        u64 i0 = block / across * SIDE, j0 = block % across * SIDE;
        f32 sum[EACH][EACH] = {};
        for (u64 k0 = 0; k0 < k; k0 += DEPTH) {
            u32 depth = k - k0 < DEPTH ? (u32)(k - k0) : DEPTH;
#pragma unroll
            for (u32 e = t; e < SIDE * DEPTH; e += 256) {
                u32 i = e / DEPTH, d = e % DEPTH;
                left[d][i] = i0 + i < m && d < depth ? widen(a[(i0 + i) * k + k0 + d]) : 0;
                u32 j = e % SIDE, h = e / SIDE;
                right[h][j] = j0 + j < n && h < depth ? widen(b[(k0 + h) * n + j0 + j]) : 0;
            }
            __syncthreads();
            // Never past k: adding 0 * 0 would turn -0 into +0.
#pragma unroll 4
            for (u32 d = 0; d < depth; d++) {
                f32 l[EACH], r[EACH];
#pragma unroll
                for (int e = 0; e < EACH; e++) l[e] = left[d][EACH * y + e], r[e] = right[d][EACH * x + e];
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int j = 0; j < EACH; j++) sum[i][j] = __fmaf_rn(l[i], r[j], sum[i][j]);
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                u64 row = i0 + EACH * y + i, column = j0 + EACH * x + j;
                if (row < m && column < n) c[row * n + column] = narrow<T>(sum[i][j]);
            }
    }
}
KERNEL matmul_f16(f16 *c, const f16 *a, const f16 *b, u64 m, u64 k, u64 n) { matmul(c, a, b, m, k, n); }
KERNEL matmul_bf16(bf16 *c, const bf16 *a, const bf16 *b, u64 m, u64 k, u64 n) { matmul(c, a, b, m, k, n); }
KERNEL matmul_f32(f32 *c, const f32 *a, const f32 *b, u64 m, u64 k, u64 n) { matmul(c, a, b, m, k, n); }
